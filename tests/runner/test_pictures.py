"""Pictures that messages name: files, data URLs, rejected ones, and conversations on the command line."""

import base64
import io
import json
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import IMAGE, image_model
from PIL import Image
from runner_support import loaded_model
from transformers import AutoProcessor, CLIPImageProcessorPil, LlavaProcessor

from cli_support import document, error, run
from hybridkv.errors import ConfigError
from hybridkv.runner import byte_tokenizer, load, picture_files, wrap
from hybridkv.runner.chat import chat_ids, chat_prompt, checked_messages
from hybridkv.runner.picture_files import open_picture

TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SIDE, TOKENS = 16, 16
"""Of a picture as the tiny LLaVA sees it: pixels, and placeholders."""


def drawn(seed: int, width: int = 20, height: int = 12) -> Any:  # noqa: ANN401  # pillow is optional, its types with it
    """Noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def stored(picture: Any, kind: str = "PNG", **options: Any) -> bytes:  # noqa: ANN401  # as pillow has them
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def data_url(octets: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(octets).decode()


def huge_png(width: int = 60000, height: int = 60000) -> bytes:
    """Few bytes that say they are 60,000 by 60,000 pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# -- readable pictures


@pytest.mark.parametrize(
    "named", ["a b.png", "{folder}/a b.png", "file://{folder}/a%20b.png", "file:a%20b.png", "data"]
)
def test_pictures_from_files_and_data_urls_are_read(named: str, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(stored(drawn(1)))
    name = data_url(stored(drawn(1))) if named == "data" else named.format(folder=tmp_path)
    picture = open_picture(name, tmp_path)
    assert (picture.mode, picture.size) == ("RGB", (20, 12))
    assert picture.tobytes() == drawn(1).tobytes()


def test_picture_is_rotated_by_exif_and_converted_to_rgb(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held sideways
    (tmp_path / "a.jpg").write_bytes(stored(drawn(1).convert("L"), "JPEG", exif=turned))
    picture = open_picture("a.jpg", tmp_path)
    assert (picture.mode, picture.size) == ("RGB", (12, 20))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("https://example.org/a.png", "is not fetched: save it and name the file, or give it as a data: URL"),
        ("HTTP://example.org/a.png", "is not fetched"),
        ("ftp://example.org/a.png", "is not fetched"),
        ("file://example.org/a.png", "is on another machine"),
        ("none.png", "cannot read picture 'none.png': No such file"),
        ("nul\0.png", "cannot read picture 'nul.x00.png'"),
        (".", "Is a directory"),
        ("pipe", "not a regular file"),
        ("text.png", "is in an unknown format: save it as one of BMP, GIF, JPEG, PNG, WEBP"),
        ("drawing.eps", "is in an unknown format: save it as one of BMP"),
        ("half.png", "cannot decode picture 'half.png'"),
        ("huge.png", "cannot decode picture 'huge.png': Image size .3600000000 pixels"),
        ("large.png", "has 97.66 KiB, more than 64 KiB"),
        ("data:image/png,abc", "must begin like data:image/png;base64,"),
        ("data:text/html;base64,abcd", "must begin like data:image/png;base64,"),
        ("data:image/png;base64,ab!d", "is not valid base64"),
        ("data:image/png;base64,abcd", "is in an unknown format: save it as one of BMP"),
        ("data:image/png;base64," + "a" * 100000, "more than 85.33 KiB"),
    ],
)
def test_unreadable_pictures_are_rejected_with_the_reason(
    named: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_files, "MOST_BYTES", 64 << 10)
    os.mkfifo(tmp_path / "pipe")
    whole = stored(drawn(1, 100, 100))
    contents = {"text.png": b"no picture", "half.png": whole[: len(whole) // 2], "huge.png": huge_png()}
    contents |= {"drawing.eps": stored(drawn(1), "EPS"), "large.png": bytes(100_000)}
    for name, octets in contents.items():
        (tmp_path / name).write_bytes(octets)
    with pytest.raises(ConfigError, match=message):
        open_picture(named, tmp_path)


@pytest.mark.parametrize("bound", [None, 1 << 40, 89_478_485])
def test_picture_with_too_many_pixels_is_rejected_before_decoding(
    bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds for any limit that the application has set in pillow."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", bound)
    with pytest.raises(ConfigError, match=r"has 8192 x 8193 pixels, more than 67,108,864: give it in a smaller size"):
        open_picture(data_url(huge_png(8192, 8193)), None)


def test_picture_files_without_a_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(stored(drawn(1)))
    for named in (str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        with pytest.raises(ConfigError, match="is a file, which is not read here"):
            open_picture(named, None)
    assert open_picture(data_url(stored(drawn(1))), None).size == (20, 12)


# -- messages


def test_picture_parts_of_every_spelling_are_equal() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}},
        {"type": "image", "url": "b.png"},
        {"type": "image", "path": "b.png"},
        {"type": "text", "text": ""},
    ]
    (found,) = checked_messages([{"role": "user", "content": content}])
    picture = {"type": "image", "image": "b.png"}
    ends = [{"type": "text", "text": one} for one in ("a", "")]
    assert found == {"role": "user", "content": [ends[0], picture, picture, picture, ends[1]]}
    (found,) = checked_messages([{"role": "user", "content": [ends[0], {"type": "text", "text": "b"}]}])
    assert found == {"role": "user", "content": "a\nb"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be text or a list of parts"),
        (["a.png"], "must be of type"),
        ([{"type": "video", "url": "a.mp4"}], 'must be of type "text", "image" or "image_url"'),
        ([{"type": "text"}], "text of a part must be text"),
        ([{"type": "image"}], "must name its image"),
        ([{"type": "image", "url": ""}], "name of an image must be text, and not empty"),
        ([{"type": "image_url", "image_url": {}}], "must name its image"),
        ([{"type": "image", "image": ["http://example.org/a.png"]}], "must name its image"),
        ([{"type": "image", "image": {"url": "a.png"}}], "must name its image"),
    ],
)
def test_invalid_content_parts_are_rejected(content: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_messages([{"role": "user", "content": content}])


# -- a folder with a processor


def asked(*parts: str | dict[str, str]) -> dict[str, Any]:
    """A message of texts and pictures."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with its processor, and pictures."""
    made = tmp_path_factory.mktemp("llava")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), IMAGE)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    square = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )
    image_model("llava").model.save_pretrained(made)
    processor.save_pretrained(made)
    for number in (1, 2):
        (made / f"{number}.png").write_bytes(stored(drawn(number)))
    return made


def plain(folder: Path, messages: list[dict[str, Any]], count: int) -> tuple[list[int], list[int]]:
    """Prompt and output of transformers alone, which opens the pictures itself."""
    loaded = load(folder)
    inputs = loaded.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        out = loaded.model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompt = inputs["input_ids"][0].tolist()
    return prompt, out[0, len(prompt) :].tolist()


def test_conversations_with_pictures_equal_plain_transformers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "near.png").write_bytes(stored(drawn(1)))
    first = [asked("What is ", {"type": "image", "path": "near.png"}, "?")]
    second = [asked({"type": "image_url", "image_url": {"url": f"file://{folder}/2.png"}}, "And this?")]  # type: ignore[dict-item]
    third = [*second, {"role": "assistant", "content": "A cat."}, asked({"type": "image", "url": "near.png"})]
    lines: list[Any] = [first, second, third, [{"role": "user", "content": "No picture."}]]
    lines.append([asked("What is ", {"type": "image", "url": data_url(stored(drawn(1)))}, "?")])
    file, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    sampling = {"max_tokens": 8, "ignore_eos": True}
    file.write_text("".join(json.dumps({"messages": one, "sampling": sampling}) + "\n" for one in lines), "utf-8")
    arguments = ("--model", folder, "--messages", file, "--output", output, "--check")
    assert document("generate", *arguments)["check"]["differences"] == []
    found = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    near = {"type": "image", "path": str(tmp_path / "near.png")}
    prompt, expected = plain(folder, [asked("What is ", near, "?")], 8)
    assert prompt.count(IMAGE) == TOKENS
    assert (found[0]["prompt_tokens"], found[0]["token_ids"]) == (len(prompt), expected)
    assert found[4]["token_ids"] == expected
    assert found[0]["messages"][0]["content"][1] == {"type": "image", "image": "near.png"}
    far = {"type": "image", "path": str(folder / "2.png")}
    said = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    prompt, expected = plain(folder, [asked(far, "And this?"), said, asked(near)], 8)
    assert (found[2]["prompt_tokens"], found[2]["token_ids"]) == (len(prompt), expected)


def test_check_without_pictures_reports_differences(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps([asked({"type": "image", "path": str(folder / "1.png")}, "?")]), "utf-8")
    monkeypatch.setattr("hybridkv.runner.check._tensors", lambda *_: {})
    found = document("generate", "--model", folder, "--messages", file, "--check", code=1)
    assert found["check"]["differences"] != []


def test_chat_keeps_pictures_in_the_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    talk = ("/image 1.png", "What?", "And?", "/image none.png", "/image", "/new", "/image 1.png", "What?", "/exit")
    done = run("chat", "--model", folder, "--max-new-tokens", "6", "--memory", "2MiB", stdin="\n".join(talk))
    out, err = done.stdout, done.stderr
    shown = "[1.png, 20 x 12, is added to your next message]"
    assert out.count(shown) == 2
    summaries = [line for line in out.splitlines() if line.startswith("[hit tokens: ")]
    prompt = len("user: What?\nassistant: ") + TOKENS
    longer = prompt + 6 + len("\nuser: And?\nassistant: ")
    seen = "prompt tokens; vision ran"
    assert summaries[0].startswith(f"[hit tokens: 0 of {prompt} {seen} 1 times for 1 pictures; 6 output tokens")
    assert summaries[1].startswith(f"[hit tokens: {prompt + 5} of {longer} {seen} 0 times for 1 pictures")
    assert summaries[2].startswith(f"[hit tokens: {prompt - 1} of {prompt} {seen} 0 times for 1 pictures")
    assert [line.partition(":")[2].strip() for line in err.splitlines()] == [
        "cannot read picture 'none.png': No such file or directory",
        "cannot read picture '': Is a directory",
    ]


# -- what is missing is one line


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "path": "none.png"}, "cannot read picture 'none.png'"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "is not fetched"),
    ],
)
def test_unreadable_picture_is_an_error_of_one_line(
    part: dict[str, str], message: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps([asked(part)]), "utf-8")
    assert message in error("generate", "--model", folder, "--messages", file)


def test_pictures_without_model_or_pillow_support_are_rejected(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = checked_messages([asked({"type": "image", "path": "1.png"}, "?")])
    done = run("chat", "--model", "tiny:llama", "--memory", "1MiB", stdin="/image 1.png\n")
    assert done.stderr == "error: LlamaForCausalLM takes no images: leave them out, or load a multimodal model\n"
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes no images"):
        chat_prompt(loaded_model("llama"), messages, folder)
    loaded = load(folder)
    with pytest.raises(ConfigError, match="use chat_prompt"):
        chat_ids(loaded, messages)
    with pytest.raises(ConfigError, match="which is not read here"):
        chat_prompt(loaded, messages)
    with pytest.raises(ConfigError, match="loaded without one: wrap the model with"):
        chat_prompt(wrap(loaded.model, loaded.tokenizer), messages, folder)
    bare = tmp_path / "bare"
    loaded.model.save_pretrained(bare)
    loaded.tokenizer.save_pretrained(bare)
    with pytest.raises(ConfigError, match=r"loaded without one \(its folder has no processor_config.json"):
        chat_prompt(load(bare), messages, folder)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pictures need pillow: pip install 'hybridkv\[images\]'"):
        chat_prompt(loaded, messages, folder)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("\nThing requires the Torchvision library but it was not\nfound", "pip install torchvision"),
        ("\nThing requires the PIL library but", "Thing requires the PIL library but"),
        ("no\nsuch  thing", "no such thing"),
    ],
)
def test_missing_processor_reason_is_one_line(
    said: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ImportError(said)

    monkeypatch.setattr(AutoProcessor, "from_pretrained", fails)
    monkeypatch.setattr(
        sys.modules["hybridkv.runner.load"], "find_spec", lambda name: None if name == "torchvision" else object()
    )
    assert load(folder).no_processor == f"it cannot be made here: {reason}"
