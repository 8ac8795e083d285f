from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from obstore.store import from_url

from buffer.config.run_settings import RunSection, WeightsSection
from buffer.errors import ConfigError, ModelError, PublicationFailed, WireError
from buffer.weights import folder_manifest as manifest
from buffer.weights.copies import CopySender
from buffer.weights.transport import PublishedWeights
from buffer.weights.transports import WeightsReceiver, open_sender, open_versions
from buffer.wire.rollout import PolicyVersion
from rolloutmq.extensions.bucket import Bucket
from tests.extensions.bucket.conftest import Link
from tests.extensions.bucket.versions import CONFIG_BYTES, FILE, LINEAGE, is_whole, save
from tests.pipeline.site import Site
from tests.pipeline.yard import Yard

ONE, TWO, THREE = (PolicyVersion(LINEAGE, version) for version in (1, 2, 3))
MIDDLE = CONFIG_BYTES + 1_000_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder of this process and of those that it starts."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return home


@contextmanager
def started(link: Link, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start an end behind the link; kill it at the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", link.endpoint)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.extensions.bucket.bucket_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    with process:
        yield process
        process.kill()


def let(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> PublishedWeights:
    assert process.stdout
    return PublishedWeights(*process.stdout.readline().split())


def fetched(yard: Yard, published: PublishedWeights, version: int) -> bool:
    with closing(receiver_of(yard, published.address.rpartition("/")[0])) as receiver:
        return is_whole(receiver.fetch(published), version)


def receiver_of(yard: Yard, url: str | None) -> WeightsReceiver:
    return WeightsReceiver(yard.store, yard.run.keys, url)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_trainer_that_is_killed_in_an_upload_leaves_whole_versions_and_the_next_one_cleans_up(
    yard: Yard, url: str, link: Link, home: Path, tmp_path: Path
) -> None:
    bucket = Bucket(url)
    with started(link, "sender", url, str(tmp_path)) as process:
        let(process)
        first = answer(process)
        link.hold(MIDDLE)
        let(process)
        assert link.held.wait(400)
    assert [bucket.find(name) is not None for name in bucket.names()] == [True, False]
    assert files_in(home)
    sender = CopySender(bucket, tmp_path)
    sender.clear()
    assert [bucket.prefix + name for name in bucket.names()] == [first.address]
    assert not files_in(home)
    assert fetched(yard, first, 1)
    assert fetched(yard, sender.write(TWO, save(2)), 2)


@pytest.mark.parametrize(
    "own", [None, "file:///elsewhere", "file://{there}/deeper", "file://{there}"]
)
def test_a_receiver_opens_no_url_that_only_redis_names_and_creates_no_folder(
    yard: Yard, tmp_path: Path, own: str | None
) -> None:
    there = tmp_path / "there"
    url = own and own.format(there=there)
    published = PublishedWeights(f"file://{there}/{LINEAGE}-000001-{'0' * 32}", "0" * 32)
    says = r"\[weights\] url of this process is" if url != f"file://{there}" else "there/: "
    with pytest.raises(WireError, match=says), closing(receiver_of(yard, url)) as receiver:
        receiver.fetch(published)
    assert not there.exists()


def test_a_worker_whose_config_names_another_bucket_says_so(yard: Yard, tmp_path: Path) -> None:
    async def scenario() -> str:
        sender = CopySender(Bucket(f"file://{tmp_path}/theirs"), tmp_path)
        async with yard.working(yard.worker(weights_url=f"file://{tmp_path}/own")):
            yard.name(1, *await asyncio.to_thread(sender.write, ONE, save(1)))  # type: ignore[arg-type]
            await yard.until(lambda: any(worker.refusal for worker in yard.run.fleet.workers()))
            return yard.run.fleet.workers()[0].refusal

    assert f"url of this process is file://{tmp_path}/own" in asyncio.run(scenario())


def test_a_worker_that_is_killed_in_a_download_leaves_nothing_that_others_would_use(
    yard: Yard, url: str, link: Link, home: Path, tmp_path: Path
) -> None:
    published = CopySender(Bucket(url), tmp_path).write(ONE, save(1))
    where = (yard.store.servers.url_of(yard.run.keys.control), yard.run.name)
    with started(link, "receiver", *where, *published) as process:
        link.hold(MIDDLE)
        let(process)
        assert link.held.wait(400)
    assert files_in(home)
    assert fetched(yard, published, 1)
    assert not files_in(home)


def test_a_link_that_stops_for_a_while_costs_time_and_nothing_else(
    yard: Yard, url: str, link: Link, home: Path, tmp_path: Path
) -> None:
    with started(link, "sender", url, str(tmp_path)) as process:
        let(process)
        first = answer(process)
        link.hold(MIDDLE)
        let(process)
        assert link.held.wait(400)
        assert fetched(yard, first, 1)
        link.open()
        second = answer(process)
    assert fetched(yard, second, 2)


async def test_a_worker_says_that_it_cannot_read_a_version_goes_on_and_loads_the_next_one(
    yard: Yard, url: str, link: Link, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is deleted in the middle of the download; then the next comes."""
    bucket = Bucket(url)
    sender = CopySender(bucket, yard.folder)
    published = await asyncio.to_thread(sender.write, ONE, save(1))
    # the worker's process reads it through the link
    monkeypatch.setenv("AWS_ENDPOINT_URL", link.endpoint)
    open_versions.cache_clear()
    async with yard.working(yard.worker(weights_url=url)) as engine:
        link.hold(CONFIG_BYTES // 2)
        yard.name(1, *published)  # type: ignore[arg-type]
        await yard.until(link.held.is_set)
        await asyncio.to_thread(bucket.drop, bucket.names()[0])
        link.open()
        await yard.until(lambda: any(worker.refusal for worker in yard.run.fleet.workers()))
        (worker,) = yard.run.fleet.workers()
        assert url in worker.refusal
        assert "secret-of-the-test" not in worker.refusal
        assert engine.version() != ONE
        published = await asyncio.to_thread(sender.write, TWO, save(2))
        yard.name(2, *published)  # type: ignore[arg-type]
        yard.enqueue(1)
        await yard.until_stages(completed=1)
        assert engine.version() == TWO
    open_versions.cache_clear()
    yard.check()


def test_changes_are_read_by_who_follows_and_who_is_late_and_only_what_they_need_is_kept(
    yard: Yard, url: str, home: Path, tmp_path: Path
) -> None:
    sender = open_sender(
        "folder", yard.store, yard.run.keys, tmp_path, keep=2, delta_base_every=3, url=url
    )
    bucket = Bucket(url)
    follower = receiver_of(yard, url)
    for version in range(1, 6):
        published = sender.write(PolicyVersion(LINEAGE, version), save(version))
        sender.prune()
        folder = follower.fetch(published)
        assert is_whole(folder, version)
        follower.keep_only(folder)
    assert fetched(yard, published, 5)  # changes to version 4
    assert [name.split("-")[1] for name in bucket.names()] == [
        "000002",
        "000003",
        "000004",
        "000005",
    ]
    sizes = [manifest.files_of(bucket.find(name) or b"") for name in bucket.names()[-2:]]
    whole, changes = (sum(file.bytes for file in files.values()) for files in sizes)
    assert changes < 0.2 * whole
    follower.close()
    sender.close()
    assert not files_in(home)


@pytest.mark.parametrize("file", [FILE, "config.json", manifest.NAME])
def test_a_flipped_byte_is_refused_and_the_right_one_is_read(
    yard: Yard, url: str, home: Path, tmp_path: Path, file: str
) -> None:
    published = CopySender(Bucket(url), tmp_path).write(ONE, save(1))
    store, path = from_url(published.address), file
    right = bytes(store.get(path).bytes())
    for wrong in (right[:-1] + bytes([right[-1] ^ 1]), right[:-1]):
        store.put(path, wrong)
        with closing(receiver_of(yard, url)) as receiver:
            with pytest.raises((WireError, ModelError), match=r"checksum|bytes"):
                receiver.fetch(published)
            assert not [path for path in files_in(home) if path.suffix != ".lock"]
            store.put(path, right)
            assert is_whole(receiver.fetch(published), 1)


def test_other_objects_are_left_alone(url: str, tmp_path: Path) -> None:
    from_url(url).put("notes/l1-000001/notes.txt", b"mine")
    sender = CopySender(Bucket(url), tmp_path, keep=1)
    for version in (ONE, TWO, THREE):
        sender.write(version, lambda folder: (folder / "config.json").write_bytes(b""))
        sender.prune()
    sender.clear()
    assert [name.split("-")[1] for name in Bucket(url).names()] == ["000003"]
    assert bytes(from_url(url).get("notes/l1-000001/notes.txt").bytes()) == b"mine"


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_folder_and_memory_are_places_too(
    yard: Yard, home: Path, tmp_path: Path, place: str
) -> None:
    url = f"{place}://{tmp_path}/bucket/{yard.run.name}"
    sender = open_sender("folder", yard.store, yard.run.keys, tmp_path, keep=1, url=url)
    older, newer = (sender.write(version, save(version.version)) for version in (ONE, TWO))
    sender.prune()
    assert fetched(yard, newer, 2)
    with closing(receiver_of(yard, url)) as receiver:
        receiver.check(newer)
        with pytest.raises(WireError, match="there are no weights"):
            receiver.check(older)


def test_a_bucket_that_is_missing_is_named_to_both_sides(
    yard: Yard, url: str, home: Path, tmp_path: Path
) -> None:
    absent = f"{url.replace('s3://', 's3://absent-')}/run"
    with pytest.raises(PublicationFailed, match=absent):
        CopySender(Bucket(absent), tmp_path).write(ONE, save(1))
    with closing(receiver_of(yard, absent)) as receiver:
        for address in (f"{absent}/x", "s4://bucket/run/x"):
            with pytest.raises(WireError, match=address.partition("://")[0]):
                receiver.fetch(PublishedWeights(address, "0" * 32))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s4://bucket/run", "known: az://"),
        ("bucket/run", "known: az://"),
        ("s3://key:secret@bucket/run", "environment"),
        ("s3://bucket/run?secret=1", "environment"),
    ],
)
def test_a_url_of_an_unknown_place_or_with_a_secret_is_a_mistake_of_the_config(
    url: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        WeightsSection(url=url)
    with pytest.raises(ConfigError, match=says):
        open_versions(url)


def test_each_run_has_a_place_of_its_own() -> None:
    section = WeightsSection(url="s3://bucket/all/")
    assert section.url_of(RunSection(name="one")) == "s3://bucket/all/one"
    assert WeightsSection().url_of(RunSection(name="one")) is None


STEPS = 6


@pytest.mark.slow
def test_a_run_is_trained_with_weights_of_a_bucket_also_after_its_trainer_was_killed(
    make_site: Callable[..., Site], url: str
) -> None:
    site = make_site(steps=STEPS, held=0)
    text = site.config.read_text(encoding="utf-8")
    site.config.write_text(f'[weights]\nurl = "{url}"\n{text}', encoding="utf-8")
    run = site.start("run")
    site.reach(2)
    site.until_held()
    site.let(2)
    run.child("train").kill()
    site.until_held()
    site.let_go()
    assert run.wait() == 0, run.said() + site.words()
    site.check()
    assert not (site.run_dir / "weights").exists()
    bucket = Bucket(f"{url}/{site.name}")
    assert all(bucket.find(name) for name in bucket.names())
    assert 1 <= len(bucket.names()) <= 3
    words = site.words()
    assert "secret-of-the-test" not in words
