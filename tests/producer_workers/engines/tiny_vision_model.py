"""Make tiny random vision-language folders.

Patches have 14 pixels, four to a token, with three-dimensional positions. The architecture is
PaddleOCR-VL's, which is Qwen2-VL's in small, because its processor needs no torchvision: there is
none that fits the CPU build of torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.producer_workers.engines.tiny_model import make_tokenizer

IMAGE = "<|IMAGE_PLACEHOLDER|>"
FIRST = "<|IMAGE_START|>"
LAST = "<|IMAGE_END|>"
VOCABULARY = 384
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    f"{{% if p['type'] == 'image' %}}{FIRST}{IMAGE}{LAST}{{% else %}}{{{{ p['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def picture(seed: int, width: int = 56, height: int = 28) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def write_processor(folder: Path) -> Any:
    """Tokenizer, chat template and image processor; returns the processor."""
    from transformers import PaddleOCRVLProcessor, PreTrainedTokenizerFast
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens={
            "image_token": IMAGE,
            "image_start_token": FIRST,
            "image_end_token": LAST,
        },
        chat_template=CHAT_TEMPLATE,
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    images = PaddleOCRVLImageProcessorPil(size=size, patch_size=14, merge_size=2)
    processor = PaddleOCRVLProcessor(
        image_processor=images, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(folder)
    return processor


def write_tiny_vision_model(folder: Path, *, seed: int) -> Path:
    """Save a model and its processor to `folder`. Two seeds are two checkpoints of one model."""
    import torch
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    tokenizer = write_processor(folder).tokenizer
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = PaddleOCRVLConfig(
        text_config=size
        | {
            "vocab_size": VOCABULARY,
            "num_key_value_heads": 1,
            "head_dim": 32,  # vLLM's CPU attention has kernels for 32, 64, 128
            "max_position_embeddings": 4096,
            "initializer_range": 0.4,  # far from uniform, so that wrong weights show in the logprobs
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config=size | {"image_size": 56, "patch_size": 14, "spatial_merge_size": 2},
        image_token_id=tokenizer.image_token_id,
        vision_start_token_id=tokenizer.convert_tokens_to_ids(FIRST),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(LAST),
        video_token_id=VOCABULARY - 1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = PaddleOCRVLForConditionalGeneration(config).float()
    places = model.model.visual.vision_model.embeddings.position_embedding.weight
    with torch.no_grad():
        # transformers 5.19 and vLLM 0.32 interpolate these differently for images of other sizes
        # (align_corners)
        places.copy_(places[:1].expand_as(places))
    model.save_pretrained(folder)
    return folder


def reference_logprobs(
    folder: Path, prompt: list[int], images: list[Image.Image], response: list[int]
) -> list[float]:
    """Return logprobs of `response` after `prompt`, which shows `images`.

    They are of a plain transformers forward pass in float32. The stop token is left out of the
    distribution, as it was for a response whose min_tokens forbade it.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = AutoProcessor.from_pretrained(folder).image_processor(
        images=images, return_tensors="pt"
    )
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        shown = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=shown, **pixels).logits[0]
    logits[:, model.config.text_config.eos_token_id] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(response)]
