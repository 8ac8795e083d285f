from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from buffer.errors import ConfigError, DatasetError
from buffer.wire.rollout import MediaRef, PolicyVersion
from buffer.wire.sampling import SampleParams
from producer_workers.build import check_images
from producer_workers.config.dataset import (
    ImagesSection,
    JsonlSection,
    ParquetSection,
    PythonSection,
)
from producer_workers.config.engine import (
    EngineConfig,
    HttpConfig,
    SimulatedConfig,
    TransformersConfig,
)
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.image_records import ImagePrompts, show_images
from producer_workers.datasets.open import open_dataset
from producer_workers.engines import build_engine
from producer_workers.engines.base import GenerationError
from producer_workers.images import ImageError, ImageFolder, collapse, find_runs, load_image
from producer_workers.producer.sampler import Sampler
from producer_workers.worker.inbox import Inbox
from producer_workers.worker.shared_engine import SharedEngine
from rolloutmq.config.load import load_config
from tests.producer_workers.engines.tiny_vision_model import (
    FIRST,
    IMAGE,
    LAST,
    picture,
    write_processor,
)

LIMITS = ImagesSection(max_bytes=100_000, max_pixels=100_000, max_images=3)


def png(image: Image.Image, **how: Any) -> bytes:
    file = BytesIO()
    image.save(file, **({"format": "PNG"} | how))
    return file.getvalue()


def write_pictures(tmp_path: Path, *pictures: Image.Image) -> list[Path]:
    """Write 0.png, 1.png … beside the rows of `open_rows`."""
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    files = [folder / f"{n}.png" for n in range(len(pictures))]
    for file, image in zip(files, pictures, strict=True):
        file.write_bytes(png(image))
    return files


def open_rows(
    tmp_path: Path, *rows: dict[str, Any], images: ImagesSection | None = LIMITS
) -> Dataset:
    file = tmp_path / "data" / "rows.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return open_dataset(JsonlSection(kind="jsonl", path=file, images=images), tmp_path)


# -- what a row may say ------------------------------------------------------


def test_images_of_a_row_are_found_wherever_it_names_them(tmp_path: Path) -> None:
    (tmp_path / "data" / "more").mkdir(parents=True)
    here = tmp_path / "data" / "a.png"
    there = tmp_path / "data" / "more" / "b.png"
    here.write_bytes(png(picture(1)))
    there.write_bytes(png(picture(2)))
    inline = "data:image/png;base64," + base64.b64encode(here.read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    rows = open_rows(
        tmp_path,
        {"question": "What?", "images": ["a.png", str(there)]},
        {"question": "Of <image> and <image>?", "images": [f"file://{there}", inline]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part, {"type": "image"}]}],
         "image": "more/b.png", "level": 3},
        {"question": "Nothing."},
    )  # fmt: skip
    found = [rows.row(n) for n in range(4)]
    assert [problem.images for problem in found] == [
        [here, there],
        [there, here.read_bytes()],
        [here, there],
        [],
    ]
    shown = [[part["type"] for part in problem.messages[0]["content"]] for problem in found[:3]]
    assert shown == [
        ["image", "image", "text"],
        ["text", "image", "text", "image", "text"],
        ["text", "image", "image"],
    ]
    assert found[3].messages == [{"role": "user", "content": "Nothing."}]
    assert [problem.extra for problem in found] == [{}, {}, {"level": 3}, {}]


def test_parquet_rows_bring_the_bytes_of_images(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = png(picture(3))
    table = pyarrow.table(
        {"question": ["What?"], "images": [[{"bytes": data, "path": "elsewhere.png"}]]}
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    section = ParquetSection(kind="parquet", path=tmp_path / "rows.parquet", images=LIMITS)
    assert open_dataset(section, tmp_path).row(0).images == [data]


def test_pictures_of_ones_own_data_set_become_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pictures.py").write_text(
        "from PIL import Image\ndef rows(): return [{'question': '?', 'image': Image.new('RGB', (30, 20), 'red')}]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    section = PythonSection(kind="python", factory="my_pictures:rows", images=LIMITS)
    (data,) = open_dataset(section, tmp_path).row(0).images
    assert isinstance(data, bytes)
    assert load_image(data, LIMITS).pixels.getpixel((0, 0)) == (255, 0, 0)


# -- what it may not ---------------------------------------------------------


def bomb() -> bytes:
    """A small PNG whose header says 60,000 x 60,000 pixels."""
    data = png(picture(1))
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "text.png": (b"<html>not found</html>", "its format is none of PNG"),
    "empty.png": (b"", "its format is none of PNG"),
    "bomb.png": (bomb(), "pixels"),
    "program.eps": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "its format is none of PNG",
    ),
    "large.png": (png(picture(1, 400, 400)), "over max_bytes"),
    "wide.png": (png(Image.new("RGB", (400, 400))), "400 x 400 pixels, over max_pixels = 100000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_file_that_is_no_image_of_this_size_is_refused_with_its_line(
    tmp_path: Path, name: str
) -> None:
    data, reason = HOSTILE[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(data)
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:2: image 0 \('{name}'\): .*{reason}"):
        open_rows(tmp_path, {"question": "?"}, {"question": "?", "images": [name]})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing.png", "there is no image"),
        ("../secret.png", "leads out of"),
        ("/etc/passwd", "leads out of"),
        ("link.png", "leads out of"),
        ("circle.png", "there is no image"),
        ("a\0b.png", "null"),
        (".", "no such file"),
        ("pipe.png", "no such file"),
        ("http://169.254.169.254/latest", "http: URIs are not fetched"),
        ("S3://bucket/a.png", "S3: URIs are not fetched"),
        ("data:image/png;base64,!!", "not valid base64"),
        ("data:image/png;base64," + "A" * 200_000, "more than max_bytes"),
        (7, "an image is a int"),
        ("", "an image is a str"),
    ],
    ids=str,
)
def test_name_that_is_no_file_of_the_folder_is_refused(
    tmp_path: Path, value: Any, reason: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret.png").write_bytes(png(picture(1)))
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "circle.png").symlink_to(data / "circle.png")
    os.mkfifo(data / "pipe.png")
    with pytest.raises(DatasetError, match=reason) as caught:
        open_rows(tmp_path, {"question": "?", "images": [value]})
    assert "rows.jsonl:1: image 0" in str(caught.value)
    assert len(str(caught.value)) < 1_000


def test_another_root_is_for_the_config_to_name_not_for_a_row(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    file = tmp_path / "pictures" / "a.png"
    file.write_bytes(png(picture(1)))
    section = ImagesSection(root=tmp_path / "pictures")
    rows = open_rows(tmp_path, {"question": "?", "images": ["a.png", str(file)]}, images=section)
    assert rows.row(0).images == [file, file]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a <image> b", "images": ["0.png", "0.png"]}, '1 "<image>", but 2 images'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": []}, "show 1 images by position"),
        ({"messages": [{"role": "system", "content": "x"}], "images": ["0.png"]}, "no message of the user to show"),
        ({"question": "?", "images": ["0.png"] * 4}, "4 images, over max_images = 3"),
    ],
)  # fmt: skip
def test_images_that_do_not_fit_the_messages_are_refused(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    write_pictures(tmp_path, picture(1))
    with pytest.raises(DatasetError, match=reason):
        open_rows(tmp_path, row)


def test_message_with_an_image_is_refused_where_the_config_wants_none(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(DatasetError, match="images"):
        open_rows(tmp_path, row, images=None)


def test_text_of_a_row_without_images_may_say_the_mark() -> None:
    messages = [{"role": "user", "content": "write <image> in HTML"}]
    assert show_images(messages, []) == (messages, [])


def test_truncated_image_is_refused_when_it_is_unpacked() -> None:
    data = png(picture(1))
    for end in range(60, len(data) - 20, 97):
        with pytest.raises(ImageError):
            load_image(data[:end], LIMITS)


def test_image_of_a_turned_camera_is_kept_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    made = load_image(png(picture(1, 40, 20), format="JPEG", exif=exif), LIMITS)
    assert (made.suffix, made.pixels.size) == ("png", (20, 40))
    with Image.open(BytesIO(made.data)) as again:
        assert np.array_equal(np.asarray(again.convert("RGB")), np.asarray(made.pixels))
    assert load_image(png(picture(1)), LIMITS).data == png(picture(1))


# -- the prompt --------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_processor(folder)
    return folder


@pytest.fixture
def sampler(model: Path, tmp_path: Path) -> Callable[[Dataset], Sampler]:
    from transformers import AutoTokenizer

    prompts = ImagePrompts(str(model), LIMITS, ImageFolder(tmp_path / "run", LIMITS))
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda rows: Sampler(
        "see",
        rows,
        tokenizer,
        SampleParams(),
        prompt_repeat_k=2,
        shuffle=False,
        max_prompt_tokens=60,
        images=prompts,
    )


def test_prompt_has_the_tokens_of_its_images_and_says_where_these_are(
    sampler: Callable[[Dataset], Sampler], model: Path, tmp_path: Path
) -> None:
    from transformers import AutoProcessor

    sources = [picture(1, 56, 28), picture(2, 60, 100)]
    write_pictures(tmp_path, *sources)
    row = {"question": "Of <image> and <image>?", "images": ["0.png", "1.png"]}
    states = sampler(open_rows(tmp_path, row)).draw(0)
    assert isinstance(states, list)
    first, second = states[0].multimodal
    assert (first.tokens, first.grid_thw) == (2, [1, 2, 4])
    assert (second.tokens, second.grid_thw) == (8, [1, 8, 4])
    for ref, source in zip((first, second), sources, strict=True):
        assert (tmp_path / "run" / ref.uri).read_bytes() == png(source)
    text = f"<|im_start|>user\nOf {FIRST}{IMAGE}{LAST} and {FIRST}{IMAGE}{LAST}?<|im_end|>\n<|im_start|>assistant\n"
    reference = AutoProcessor.from_pretrained(model)(text=[text], images=sources)
    assert states[0].prompt_ids is not None
    assert states[0].prompt_ids.tolist() == reference["input_ids"][0]
    assert states[0].multimodal == states[1].multimodal


def test_prompt_of_another_image_is_another_prompt(
    sampler: Callable[[Dataset], Sampler], tmp_path: Path
) -> None:
    write_pictures(tmp_path, picture(0), picture(1))
    rows = open_rows(
        tmp_path, *({"question": "?", "images": [f"{n}.png"]} for n in range(2)), {"question": "?"}
    )
    draws = [sampler(rows).draw(n) for n in range(3)]
    states = [draw[0] for draw in draws if isinstance(draw, list)]
    assert len({state.extra["prompt_hash"] for state in states}) == 3
    assert [len(state.multimodal) for state in states] == [1, 1, 0]


def test_nothing_is_kept_of_a_prompt_that_is_too_long(
    sampler: Callable[[Dataset], Sampler], tmp_path: Path
) -> None:
    write_pictures(tmp_path, picture(1))
    rows = open_rows(tmp_path, {"question": "1 + 1" * 50, "images": ["0.png"]})
    assert not isinstance(sampler(rows).draw(0), list)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", [IMAGE, f"{IMAGE}{IMAGE}", f"{FIRST}{IMAGE}{LAST}"])
def test_text_that_says_the_models_image_token_shows_no_image(
    sampler: Callable[[Dataset], Sampler], tmp_path: Path, text: str
) -> None:
    write_pictures(tmp_path, picture(1))
    rows = open_rows(tmp_path, *({"question": q, "images": ["0.png"]} for q in ("?", text)))
    made = sampler(rows)
    made.max_prompt_tokens = None
    plain, hostile = (made.draw(n) for n in range(2))
    assert isinstance(plain, list)
    assert isinstance(hostile, list)
    ids = plain[0].prompt_ids, hostile[0].prompt_ids
    assert made.images is not None
    image_token = made.images._processor.image_token_id
    counts = [np.count_nonzero(each == image_token) for each in ids]
    assert counts == [plain[0].multimodal[0].tokens, hostile[0].multimodal[0].tokens]
    assert counts[0] == counts[1]


def test_image_that_broke_after_the_file_was_opened_is_told_with_its_row(
    sampler: Callable[[Dataset], Sampler], tmp_path: Path
) -> None:
    (file,) = write_pictures(tmp_path, picture(1))
    rows = open_rows(tmp_path, {"question": "?", "images": ["0.png"]})
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DatasetError, match="an image of row 0: it is a broken image"):
        sampler(rows).draw(0)


def test_runs_of_images_are_found_though_they_touch() -> None:
    ids = np.array([1, 9, 9, 9, 2, 9], "<i4")
    runs = find_runs(ids, 9, [1, 2, 1])
    assert runs == [slice(1, 2), slice(2, 4), slice(5, 6)]
    assert collapse(ids, runs) == [1, 9, 9, 2, 9]
    for wrong in ([4], [2, 2], [3, 2], [0, 3]):
        with pytest.raises(ValueError, match="in a row for image"):
            find_runs(ids, 9, wrong)


# -- the files of a run --------------------------------------------------------


def test_an_image_is_written_once_for_all_draws_that_show_it(
    sampler: Callable[[Dataset], Sampler], tmp_path: Path
) -> None:
    write_pictures(tmp_path, picture(1), picture(2))
    names = [["0.png"], ["0.png", "1.png"]]
    rows = open_rows(tmp_path, *({"question": "?", "images": each} for each in names))
    one, two = (sampler(rows), sampler(rows))  # as two producers that follow each other
    uris = []
    written: dict[str, int] = {}
    for draw, made in ((0, one), (1, one), (2, two), (3, two)):
        states = made.draw(draw)
        assert isinstance(states, list)
        uris.append([ref.uri for ref in states[0].multimodal])
        for file in (tmp_path / "run" / "images").iterdir():
            assert file.stat().st_mtime_ns == written.setdefault(file.name, file.stat().st_mtime_ns)
    assert uris[:2] == uris[2:]
    assert {f"images/{name}" for name in written} == set(uris[1])


def test_a_producer_that_was_killed_while_it_wrote_an_image_leaves_none_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ImageFolder(tmp_path, LIMITS)
    data = png(picture(1))

    class Killed(BaseException):
        """The process ends here."""

    def die(_: object) -> None:
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr("producer_workers.images.os.fsync", die)
        with pytest.raises(Killed):
            folder.put(data, "png")
    assert list(tmp_path.glob("images/[!.]*")) == []
    ref = MediaRef(kind="image", uri=folder.put(data, "png"), tokens=2)
    assert np.array_equal(np.asarray(folder.read(ref).pixels), np.asarray(picture(1)))


def test_only_an_image_of_the_run_is_read_and_only_as_it_was_written(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "run", LIMITS)
    data = png(picture(1))
    uri = folder.put(data, "png")
    file = tmp_path / "run" / uri
    (tmp_path / "secret.png").write_bytes(data)

    def refused(reason: str, uri: str = uri, **changes: Any) -> None:
        with pytest.raises(ImageError, match=reason):
            folder.read(MediaRef(**{"kind": "image", "uri": uri} | changes))

    for other in ("http://127.0.0.1:9/0.png", f"file://{file}", str(file), "images/../../secret.png",
                  "images/0.png", uri.removeprefix("images/")):  # fmt: skip
        refused("not an image of the run", other)
    refused("is video", kind="video")
    refused("cannot be read", f"images/{40 * '0'}.png")
    with pytest.raises(ImageError, match="over max_bytes"):
        ImageFolder(tmp_path / "run", ImagesSection(max_bytes=4)).read(MediaRef("image", uri))
    file.write_bytes(png(picture(2)))
    refused("has changed")
    file.unlink()
    file.symlink_to(tmp_path / "secret.png")
    refused("cannot be read")
    text = folder.put(b"no image", "png")
    refused("none of PNG", text)


# -- who shows them ----------------------------------------------------------

SHOWN = [MediaRef(kind="image", uri="images/0.png", tokens=2)]
FIRST_WEIGHTS = PolicyVersion("main", 0)


@pytest.mark.parametrize(
    "config", [HttpConfig(url="http://127.0.0.1:9"), TransformersConfig()], ids=lambda c: c.kind
)
def test_engine_that_shows_no_images_is_asked_for_nothing_with_some(config: EngineConfig) -> None:
    engine = SharedEngine(build_engine(config, Path(), FIRST_WEIGHTS), Inbox())
    with engine.shown("see-0000000000", []):
        pass
    with (
        pytest.raises(
            GenerationError,
            match=f"see-0000000000 has images, which the engine {config.kind} cannot show",
        ),
        engine.shown("see-0000000000", SHOWN),
    ):
        pytest.fail("it went on")


def test_worker_with_an_engine_that_shows_no_images_serves_no_task_with_some(
    tmp_path: Path,
) -> None:
    text = """
        run = {{ name = "x" }}
        engine = {{ kind = "transformers" }}
        [tasks.see]
        judge = "exact_match"
        dataset = {{ kind = "jsonl", path = "{0}/rows.jsonl", images = {{}} }}
        [tasks.read]
        judge = "exact_match"
        dataset = {{ kind = "jsonl", path = "{0}/rows.jsonl" }}
    """
    (tmp_path / "run.toml").write_text(text.format(tmp_path))
    config = load_config(tmp_path / "run.toml", ["trainer.loop=my_loop:train"])
    engine = build_engine(config.engine, Path(), FIRST_WEIGHTS)
    check_images(config, ["read"], engine)
    with pytest.raises(
        ConfigError, match="task see shows images, which the reference trainer cannot train on"
    ):
        load_config(tmp_path / "run.toml")
    check_images(config, ["see"], build_engine(SimulatedConfig(), Path(), FIRST_WEIGHTS))
    with pytest.raises(
        ConfigError, match="the engine transformers cannot show the images of task 'see'"
    ):
        check_images(config, ["read", "see"], engine)
