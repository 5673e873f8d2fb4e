"""Write the golden models with a vision tower that the tests compare Quire with.

Needs torch and transformers 5; the tests need neither, they read what this wrote. Everything is seeded: running it
again with the same versions gives the same files.

usage: make_vision_goldens.py [OUT_DIR [CASE ...]]    OUT_DIR defaults to this file's folder, the cases to all

Per case a folder as make_goldens.py writes it, with random weights, golden.npz for a prompt without images, and
images.npz with
    token_ids  int64 [tokens], with a run of placeholders for each image
    pixels     uint8 [images, height, width, 3]
    rows       float32 [images, placeholders, hidden]: what takes the place of embeddings, from transformers in f32
    logits     float32 [tokens, vocab]
of a family whose images have any size, pixels_0, rows_0, pixels_1, … instead of pixels and rows.

smolvlm is a whole chat instead, with files of images/, which must be there: tiles.npz has rows and logits alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import as_transformers_4, randomize
from make_image_goldens import CHATS, FOLDER, chat, processor_of
from transformers.image_utils import load_image
from transformers.processing_utils import ProcessorMixin

SEED = 20261124
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.25, 0.2)
TOKENS = 60  # tokens without images
IMAGE_TOKEN = 159  # image token of all cases
SIGLIP = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 72,
    "image_size": 64,
    "patch_size": 7,
}


@dataclass(frozen=True)
class Case:
    seed: int  # seed after SEED: a case that is added changes no other
    model: str  # the class in transformers; its config's class has the same stem
    text: dict[str, Any]
    vision: dict[str, Any]
    config: dict[str, Any]
    images: int
    size: int  # pixels of each side of an image
    num_tokens: int  # placeholders of an image
    shapes: tuple[tuple[int, int], ...] = ()  # height and width of each image, for towers of images of any size
    four: dict[str, Any] | None = None  # keys of the text model that only transformers 4 writes


CASES = {
    "idefics3": Case(  # SmolVLM: pixels beyond the last patch, a grid whose positions are rounded, an odd hidden size
        0,
        "Idefics3",
        {
            "model_type": "llama",
            "vocab_size": 160,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        SIGLIP,
        {"scale_factor": 3, "image_token_id": IMAGE_TOKEN, "pad_token_id": 0},
        images=2,
        size=64,
        num_tokens=9,
    ),
    "qwen2_5_vl": Case(  # images of one number of tokens with other sides, which fill no whole number of windows
        1,
        "Qwen2_5_VL",
        {
            "vocab_size": 160,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        {
            "depth": 3,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 56,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        {"image_token_id": 159, "tie_word_embeddings": False},
        images=2,
        size=0,
        num_tokens=15,
        shapes=((24, 40), (40, 24)),
    ),
    "qwen3_vl": Case(  # learned positions for interpolation, two levels of DeepStack
        2,
        "Qwen3VL",
        {
            "vocab_size": 160,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        {
            "depth": 4,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 56,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
            "out_hidden_size": 64,
        },
        {"image_token_id": 159, "tie_word_embeddings": False},
        images=2,
        size=0,
        num_tokens=15,
        shapes=((24, 40), (40, 24)),
    ),
    "qwen3_5_images": Case(  # gated delta nets beside attention, a part of each head rotated by three positions
        3,
        "Qwen3_5",
        {
            "vocab_size": 160,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 96,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 2, 1],
                "mrope_interleaved": True,
            },
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        {
            "depth": 3,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 56,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "out_hidden_size": 64,
        },
        {"image_token_id": 159, "tie_word_embeddings": False},
        images=2,
        size=0,
        num_tokens=15,
        shapes=((24, 40), (40, 24)),
        four={"full_attention_interval": 2},
    ),
    "gemma3_images": Case(  # pixels beyond the last patch, a window that is hardly longer than an image
        1,
        "Gemma3",
        {
            "model_type": "gemma3_text",
            "vocab_size": 160,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
            "query_pre_attn_scalar": 20,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        SIGLIP,
        {"mm_tokens_per_image": 9, "image_token_index": IMAGE_TOKEN, "boi_token_index": 157, "eoi_token_index": 158},
        images=2,
        size=64,
        num_tokens=9,
        four={"sliding_window_pattern": 3},
    ),
}

SMOLVLM: dict[str, Any] = {  # keys that images/smolvlm/config.json does not have
    "text_config": {
        "model_type": "llama",
        "vocab_size": 288,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "vision_config": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 72},
    "pad_token_id": 0,
}


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, case in CASES.items():
        if name in (sys.argv[2:] or CASES):
            torch.manual_seed(SEED + case.seed)
            write_case(out / name, case)
    if "smolvlm" in (sys.argv[2:] or ["smolvlm"]):
        torch.manual_seed(SEED)
        write_chat(out / "smolvlm", "two")


def write_case(folder: Path, case: Case) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    config_class = getattr(transformers, f"{case.model}Config")
    config = config_class(text_config=case.text, vision_config=case.vision, **case.config)
    model_class = getattr(transformers, f"{case.model}ForConditionalGeneration")
    model = model_class(config)
    randomize(model, 1.0)
    if case.model in ("Gemma3", "Qwen3_5"):  # the norms have weights less 1
        randomize(model.model.language_model, 0.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    five = json.loads((folder / "config.json").read_text())
    text = as_transformers_4(five["text_config"] | {"dtype": five["dtype"]})
    four = {**five, "text_config": {**text, **(case.four or {})}}
    if case.shapes:
        four = as_on_the_hub(four, case.model, five["text_config"]["rope_parameters"]["mrope_section"])
    for name, values in (("config.json", five), ("other_config.json", four)):
        (folder / name).write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    processor: dict[str, Any] = {"rescale_factor": 1 / 255, "image_mean": MEAN, "image_std": STD}
    if case.shapes:
        processor |= {"patch_size": case.vision["patch_size"], "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1) + "\n")
    loaded = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        write_text_golden(folder, case, loaded)
        write_image_golden(folder, case, loaded)


def as_on_the_hub(config: dict[str, Any], model: str, sections: list[int]) -> dict[str, Any]:
    """Return a config of Qwen as transformers 4 has it; Qwen2.5-VL's has the keys of the text model at the top."""
    if model != "Qwen2_5_VL":
        rope = {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": True}
        vision = {key: value for key, value in config["vision_config"].items() if key != "rope_parameters"}
        return {**config, "text_config": config["text_config"] | {"rope_scaling": rope}, "vision_config": vision}
    text = {key: value for key, value in config.pop("text_config").items() if key != "model_type"}
    return {**text, **config, "rope_scaling": {"type": "mrope", "mrope_section": sections}}


def write_text_golden(folder: Path, case: Case, model: torch.nn.Module) -> None:
    token_ids = torch.randint(2, case.text["vocab_size"] - 1, (1, TOKENS))
    logits = model(input_ids=token_ids).logits[0]
    np.savez_compressed(folder / "golden.npz", token_ids=token_ids[0].numpy(), logits=logits.numpy())


def write_image_golden(folder: Path, case: Case, model: torch.nn.Module) -> None:
    placeholders = torch.full((case.num_tokens,), IMAGE_TOKEN)
    text = torch.randint(2, case.text["vocab_size"] - 1, (TOKENS,)).split([TOKENS // 4] * 4)
    token_ids = torch.cat([text[0], placeholders, text[1], text[2], placeholders, text[3]])[None]
    if case.shapes:
        write_shapes_golden(folder, case, model, token_ids)
        return
    pixels = torch.randint(0, 256, (case.images, case.size, case.size, 3), dtype=torch.uint8)
    pixels[1] = (pixels[1] // 8 + torch.arange(case.size)[:, None, None] * 3).to(torch.uint8)  # a gradient with noise
    values = (pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    values = values.permute(0, 3, 1, 2)
    inputs = {"input_ids": token_ids}
    if case.model == "Gemma3":
        inputs["token_type_ids"] = (token_ids == IMAGE_TOKEN).long()
    else:
        values = values[None]
    rows = model.model.get_image_features(values)
    rows = rows if isinstance(rows, torch.Tensor) else rows.pooler_output
    logits = model(**inputs, pixel_values=values).logits[0]
    np.savez_compressed(
        folder / "images.npz",
        token_ids=token_ids[0].numpy(),
        pixels=pixels.numpy(),
        rows=rows.reshape(case.images, case.num_tokens, -1).numpy(),
        logits=logits.numpy(),
    )


def write_shapes_golden(folder: Path, case: Case, model: torch.nn.Module, token_ids: torch.Tensor) -> None:
    """Write the golden of images of several shapes, with the patches of a video of two equal frames."""
    patch = case.vision["patch_size"]
    scale = 2
    patches = []
    grids = []
    arrays = {}
    for index, (height, width) in enumerate(case.shapes):
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
        pixels = (pixels // 4 + torch.arange(height)[:, None, None] * 4).to(torch.uint8)
        arrays[f"pixels_{index}"] = pixels.numpy()
        values = ((pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)
        rows, columns = height // patch, width // patch
        split = values.expand(2, -1, -1, -1).reshape(2, 3, rows // scale, scale, patch, columns // scale, scale, patch)
        patches.append(split.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    grid = torch.tensor(grids)
    values = torch.cat(patches)
    features = model.model.get_image_features(values, grid)
    levels = [torch.cat(features.pooler_output), *getattr(features, "deepstack_features", ())]
    rows = torch.cat(levels, dim=1).split([len(each) for each in features.pooler_output])
    arrays |= {f"rows_{index}": each.numpy() for index, each in enumerate(rows)}
    kinds = (token_ids == case.config["image_token_id"]).int()
    logits = model(input_ids=token_ids, pixel_values=values, image_grid_thw=grid, mm_token_type_ids=kinds).logits[0]
    np.savez_compressed(folder / "images.npz", token_ids=token_ids[0].numpy(), logits=logits.numpy(), **arrays)


def write_chat(folder: Path, name: str) -> None:
    """Write SmolVLM and its answer to a chat of `CHATS`: from files of images to logits, by transformers alone."""
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER / "smolvlm")
    own = json.loads((FOLDER / "smolvlm" / "config.json").read_text())
    vision = own["vision_config"] | SMOLVLM["vision_config"]
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.SmolVLMConfig(**{**own, **SMOLVLM, "vision_config": vision, "image_token_id": image_token})
    model = transformers.SmolVLMForConditionalGeneration(config)
    randomize(model, 1.0, attention=0.7)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    kwargs: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(folder, **kwargs).eval()
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # videos need torchvision
    processor = processor_of("smolvlm", tokenizer)
    processor.image_processor.do_rescale = processor.image_processor.do_normalize = True
    parts, files = CHATS[name]
    text = tokenizer.apply_chat_template(chat(*parts), tokenize=False, add_generation_prompt=True)
    images = [load_image(str(FOLDER / "files" / file)) for file in files]
    inputs = processor(images=images, text=[text], add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        rows = model.model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"])
        rows = rows if isinstance(rows, torch.Tensor) else rows.pooler_output
        logits = model(**inputs).logits[0]
    np.savez_compressed(folder / "tiles.npz", rows=rows.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()
