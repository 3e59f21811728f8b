"""Parts of tiny models, built in memory: tokenizers trained on a few sentences, and text encoders of the real classes.

With them every adapter runs offline on a CPU through its real pipeline. The tiny denoisers and VAEs are
configurations and stand beside the released ones in each model's file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

CORPUS = (
    "A small red cube on a white table",
    "A detailed cinematic scene of a glass observatory above a quiet lake at sunrise, with soft mist, "
    "warm reflections, and crisp architectural detail",
    "system user assistant: describe the image by its color, shape, size, texture, quantity and objects",
    "0 1 2 3 4 5 6 7 8 9",
)
TINY_VOCABULARY = 1_000
"""Every tiny tokenizer is smaller than this, every released one larger."""

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
                "<|vision_end|>")  # fmt: skip
QWEN_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
GLM_SPECIAL = ("<pad>", "<|image|>", "<sop>", "<eop>", "<|dit_token_16384|>", "[gMASK]", "<|user|>", "<|assistant|>")
GLM_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|image|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endfor -%}"""
GLM_AR_WIDTH = 32
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")


def _train(tokenizer: Any, corpus: Sequence[str], *, special: Sequence[str], alphabet: list[str], size: int) -> Any:
    """(vocabulary, merges) of a byte-pair encoding trained on the corpus."""
    from tokenizers import trainers

    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def qwen_tokenizer() -> Any:
    """A Qwen2Tokenizer of about 400 tokens: byte-level pairs, chat markers, a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2Tokenizer

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary, merges = _train(trained, CORPUS, special=QWEN_SPECIAL, alphabet=alphabet, size=420)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=list(QWEN_SPECIAL[1:]))
    tokenizer.chat_template = QWEN_CHAT_TEMPLATE
    return tokenizer


def gemma_tokenizer() -> Any:
    """A GemmaTokenizer of about 500 tokens: spaces as U+2581, unknown characters as `<0xNN>` byte pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GemmaTokenizer

    trained = Tokenizer(models.BPE())
    # Pieces end with their word: a released tokenizer would not hold a whole sentence in one token either.
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    corpus = [sentence.replace(" ", "\u2581") for sentence in CORPUS]
    special = [*GEMMA_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary, merges = _train(trained, corpus, special=special, alphabet=[], size=500)
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def qwen25_vl(vocabulary: int, *, width: int = 16) -> Any:
    """A two-layer Qwen2.5-VL whose last hidden state has `width` channels."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": vocabulary, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=3, video_token_id=4, vision_start_token_id=5,
        vision_end_token_id=6,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3(vocabulary: int, *, width: int = 16) -> Any:
    """A two-layer Qwen3 decoder."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, vocab_size=vocabulary, max_position_embeddings=4096,
    )  # fmt: skip
    return Qwen3Model(config)


def gemma2(vocabulary: int, *, width: int = 8) -> Any:
    """A one-layer Gemma-2 decoder."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        head_dim=16, hidden_size=width, intermediate_size=64, max_position_embeddings=8192,
        num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=2, vocab_size=vocabulary,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Gemma2Model(config)


def gemma3(vocabulary: int, *, width: int = 16) -> Any:
    """A two-layer Gemma-3 with a vision tower that no prompt reaches: three hidden states of `width` channels."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": vocabulary, "max_position_embeddings": 4096,
        "sliding_window": 64, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=vocabulary - 1,
        boi_token_index=vocabulary - 2, eoi_token_index=vocabulary - 3,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def t5_encoder(*, width: int = 32) -> Any:
    """A two-layer T5 encoder over ByT5's 384 byte tokens; `ByT5Tokenizer()` itself needs no files."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=384, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2))


def glm_image_processor() -> Any:
    """GLM-Image's processor with a tokenizer of about 420 tokens and the image processor that needs no torchvision.

    Its named tokens are given as extra special ones: plain attributes are lost when a pipeline is saved.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GlmImageProcessor, PreTrainedTokenizerFast
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary, merges = _train(trained, CORPUS, special=GLM_SPECIAL, alphabet=alphabet, size=420)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<|dit_token_16384|>",
        additional_special_tokens=list(GLM_SPECIAL[1:]),
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )  # fmt: skip
    images = GlmImageImageProcessorPil()
    return GlmImageProcessor(image_processor=images, tokenizer=tokenizer, chat_template=GLM_CHAT_TEMPLATE)


def glm_image_ar(*, codebook: int = 128) -> Any:
    """A two-layer GLM-Image autoregressive model that samples image tokens below `codebook`."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    text = {
        "hidden_size": GLM_AR_WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": max(512, codebook), "vision_vocab_size": codebook,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "eos_token_id": codebook - 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 32, "patch_size": 8, "intermediate_size": 32}
    quantizer = {"embed_dim": 32, "num_embeddings": codebook, "latent_channels": 32}
    config = GlmImageConfig(
        text_config=text, vision_config=vision, vq_config=quantizer, image_token_id=1,
        image_start_token_id=codebook - 2, image_end_token_id=codebook - 1,
    )  # fmt: skip
    model = GlmImageForConditionalGeneration(config)
    # As initialised, all tokens are about equally likely whatever the prompt, and every prompt samples one prior.
    model.lm_head.weight.data.mul_(20)
    # Random weights would sample the end token early, and the pipeline could not reshape what is there.
    model.generation_config.eos_token_id = None
    return model


def qwen3_vl(vocabulary: int, *, layers: int, width: int = 16) -> Any:
    """A Qwen3-VL with its head; pipelines that tap a deep hidden state need as many layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocabulary, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": width,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=3, video_token_id=4, vision_start_token_id=5,
        vision_end_token_id=6,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config)
