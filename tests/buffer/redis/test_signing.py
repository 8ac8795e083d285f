"""What a signature proves: bytes of one claim, group and run, by owners of keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError, RolloutMQError, SignatureError, WireError
from buffer.job import PayloadRef
from buffer.redis.signing import PRODUCER, Key, Keyring, Signer, read_keys, write_keys
from buffer.wire.framing import signed_block, signers, split_signed
from tests.buffer.scene import Scene, turn

RUN = "0123456789abcdef" * 2
OTHER_RUN = RUN[::-1]
GID = "math-0000000001"
CLAIM = "c1"
BYTES = b"\x83group"
W1, W2, STRANGER, MAKER = (
    Key(name, f"{number:x}" * 64)  # the same in each process that collects these tests
    for number, name in enumerate(("w1", "w2", "stranger", PRODUCER), 10)
)


def ref(gid: str = GID, token: str = CLAIM) -> PayloadRef:
    return PayloadRef(gid, token, 1, 0, "")


def signed(
    key: Key = W1,
    *before: str,
    run: str = RUN,
    gid: str = GID,
    token: str = CLAIM,
    data: bytes = BYTES,
) -> bytes:
    return Signer(run, key).sign(gid, token, [data], before) + data


def lines(data: bytes) -> tuple[str, ...]:
    return tuple(split_signed(data)[0])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "workers.keys"
    write_keys(file, {key.worker: [key.secret] for key in (W1, W2)})
    return file


@pytest.fixture
def keyring(file: Path) -> Keyring:
    return Keyring(RUN, file)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (BYTES, "is not signed"),
        (signed(STRANGER), "signature of stranger .* it has no key"),
        (signed(Key("w1", W2.secret)), "signature of w1 .* not of its key"),
        (signed(token="c2"), "for another claim"),
        (signed(gid="math-0000000002"), "not of its key"),
        (signed(run=OTHER_RUN), "not of its key"),
        (signed() + b"x", "not those that were signed"),
        (signed(W1, *lines(signed(STRANGER, token="c0"))), "stranger .* no key"),
        (signed(W1, *lines(signed(W2, token="c0", gid="math-0000000002"))), "w2 .* not of its key"),
        (b"signed by\n\n" + BYTES, "is not signed"),
        (b"signed by\nw1\n\n" + BYTES, "not the line of a signature"),
        (b"signed by\n" + b"x" * 2**17 + b"\n\n", "have no end"),
    ],
)
def test_what_is_not_signed_for_this_claim_is_refused(
    keyring: Keyring, data: bytes, reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        keyring.check(ref(), data)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), continued=st.booleans())
def test_no_bit_can_be_changed(position: int, bit: int, continued: bool) -> None:
    data = bytearray(signed(W2, *(lines(signed(token="c0")) if continued else ())))
    position %= len(data)
    data[position] ^= 1 << bit
    keyring = Keyring.__new__(Keyring)
    keyring._run = RUN
    keyring._current = lambda: {W1.worker: [W1.secret], W2.worker: [W2.secret]}  # type: ignore[method-assign]
    # spaces of the first line only align what follows
    if data[position] ^ (1 << bit) == ord(" ") and position < data.index(b"\n"):
        return
    with pytest.raises(RolloutMQError):
        keyring.check(ref(), bytes(data))


def test_a_continued_group_is_signed_by_each_of_its_workers(keyring: Keyring) -> None:
    first = signed(W1, token="c0", data=b"partial")
    Signer(RUN, W2).check(ref(token="c0"), first)
    whole = signed(W2, *lines(first))
    keyring.check(ref(), whole)
    assert signers(lines(whole)) == ["w1", "w2"]
    for stolen in (b"partial", signed(W1, token="c0", data=b"partial") + b"x"):
        with pytest.raises(SignatureError):
            Signer(RUN, W2).check(ref(token="c0"), stolen)
    # nobody else can take a line away
    with pytest.raises(SignatureError, match="w2"):
        keyring.check(ref(), signed_block(lines(whole)[1:]) + BYTES)


def test_the_turns_of_a_worker_that_died_are_signed_by_it(scene: Scene, tmp_path: Path) -> None:
    run = scene.run
    write_keys(tmp_path / "all", {key.worker: [key.secret] for key in (W1, W2, MAKER)})
    run.payloads.signer = Signer(run.nonce, MAKER)
    scene.enqueue(1)
    payload = scene.payload
    for key in (W1, W2):
        run.payloads.signer = Signer(run.nonce, key)
        (job,) = scene.claim(worker=key.worker)
        group = run.buffer.read(job.payload)
        kept = scene.turns(job, group)
        for number in range(2):
            kept.add(turn(number))
            kept.store()
        run.payloads.keyring = Keyring(run.nonce, tmp_path / "all")
        names = signers(run.buffer.read(payload(job.gid)).signatures)
        assert names == ["w1", "w2"][: len(names)]
        run.payloads.keyring = None
        if key is W1:
            scene.expire_leases("w1")
            run.jobs.reap()
    # one of them is there twice
    keys = scene.keys.payload_chunks(job.gid, payload(job.gid).token, 3)
    scene.raw.set(keys[2], scene.raw.get(keys[1]))
    with pytest.raises(SignatureError):
        run.buffer.read(replace(payload(job.gid), chunks=3, size=0, crc=""))


def test_prompts_are_signed_where_the_trainer_knows_the_producer(
    keyring: Keyring, file: Path
) -> None:
    prompt = signed(MAKER, token="init", data=b"prompt")
    Signer(RUN, W1).check(ref(token="init"), prompt)
    Signer(RUN, W1).check(ref(token="init"), b"prompt")
    with pytest.raises(SignatureError):
        Signer(RUN, W1).check(ref(token="init"), prompt + b"!")
    keyring.check(ref(), signed(W1))
    write_keys(file, read_keys(file) | {PRODUCER: [MAKER.secret]})
    keyring.check(ref(), signed(W1, *lines(prompt)))
    keyring.check(ref(), signed(MAKER))  # what an operator puts or imports
    for before in ((), lines(signed(W2, token="init", data=b"prompt"))):
        with pytest.raises(SignatureError, match="prompt not by the producer"):
            keyring.check(ref(), signed(W1, *before))


def test_keys_change_while_a_trainer_runs(keyring: Keyring, file: Path) -> None:
    newer = Key.new("w1")
    old, new = signed(W1), signed(newer)
    write_keys(file, read_keys(file) | {"w1": [W1.secret, newer.secret]})
    assert Key.read(file, "w1") == newer
    for data in (old, new):
        keyring.check(ref(), data)
    write_keys(file, {"w1": [newer.secret]})
    keyring.check(ref(), new)
    for data in (old, signed(W2)):
        with pytest.raises(SignatureError):
            keyring.check(ref(), data)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        keyring.check(ref(), new)


@pytest.mark.parametrize(
    "text",
    [f"w1 {W1.secret}x", f"w1  {W1.secret}", W1.secret, f"a/b {W1.secret}", f"ä {W1.secret}"],
)
def test_a_wrong_file_is_refused_and_not_quoted(file: Path, text: str) -> None:
    file.write_text(f"w2 {W2.secret}\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_keys(file)
    assert W1.secret not in f"{refused.value!r} {refused.value.hint} {refused.value.__cause__!r}"


def test_only_the_owner_reads_and_finds_a_key(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    assert W1.secret not in repr(W1) + repr(Signer(RUN, W1))
    with pytest.raises(ConfigError, match="has keys of w1, w2, not of w3"):
        Key.read(file, "w3")
    with pytest.raises(ConfigError, match="not of one worker"):
        Key.read(file)
    file.chmod(0o640)
    for read in (read_keys, Key.read, lambda file: Keyring(RUN, file)):
        with pytest.raises(ConfigError, match="readable by other users"):
            read(file)


def test_lines_keep_columns_aligned_and_are_bounded() -> None:
    for count in range(1, 20):
        assert len(signed_block(["x" * count])) % 8 == 0
    with pytest.raises(WireError, match="signatures"):
        signed_block(["x" * 200] * 400)
