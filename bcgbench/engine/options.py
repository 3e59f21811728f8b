"""The engine's ideas, each of which can be switched off to see what it gains. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All on by default. None changes a result."""

    skip_unchanged: bool = True
    """An argument is copied only if its object or its in-place counter changed; off, at every call."""
    known_calls: bool = True
    """A signature is told from the objects of the last calls; off, every call's arguments are walked."""
    kernel_breaks: bool = True
    """The policy `attention` breaks at torch's attention kernel; off, at the function around it."""
    shared_results: bool = True
    """Equal small results of one forward are made once; off, in each block again, as eager makes them."""
    pooled_outputs: bool = True
    """What a break returns is copied into the next segment's pool; off, into memory of its own, held for ever."""
    pulled_outputs: bool = True
    """What a break returns is copied by the segment that reads it; off, by a memcpy before it."""
    borrowed_inputs: bool = True
    """A break reads the graph's memory without owning it; off, each tensor that it reads is held for ever."""
    first_block: bool = True
    """A new pool begins with one block of the forward's peak; off, it grows by itself."""

    def without(self, *names: str) -> Options:
        """These ideas switched off."""
        return replace(self, **dict.fromkeys(names, False))


DEFAULT = Options()
