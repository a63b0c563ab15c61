"""What is kept comes back whole or not at all, whatever a client sends and whenever the power goes.

The crash tests run real processes: an audit hook ends one before its k-th change of the disk, for every k, and tears
each file that was not fsynced by then.
"""

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import (
    SEGMENTS,
    Checkpoint,
    Command,
    Full,
    Journal,
    Mirror,
    Protector,
    Record,
    Store,
    TinkerPath,
    check_folder,
    check_name,
    files_under,
    main,
    new_id,
    restore_state,
    seal_folder,
)

RUN = "0123abcd:train:1"
A = TinkerPath(RUN, "weights", "a")
B = TinkerPath(RUN, "sampler_weights", "b")
OLD = {"adapter.safetensors": b"old" * 1000, "optimizer/moments.safetensors": b"o"}
NEW = {"adapter.safetensors": b"new" * 2000, "optimizer/moments.safetensors": b"n", "extra": b""}

spawn = multiprocessing.get_context("spawn")
run_ids = st.builds("{}:train:{}".format, st.text("abz059", min_size=6, max_size=40), st.integers(0, 999_999_999))
names = st.text("abzABZ059._-", min_size=1, max_size=128).filter(lambda name: name[0] != ".")
paths = st.builds(TinkerPath, run_ids, st.sampled_from(sorted(SEGMENTS)), names)
hostile = st.text() | st.sampled_from(
    ["", ".", "..", "../..", "/", "/x/y", "a/b", "a\\b", "a\0b", "a\n", ".hidden", "x" * 129, "a:b", "é", "snapshots"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "state") as store:
        yield store


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    found = {str(f.relative_to(checkpoint.folder)): f.read_bytes() for f in checkpoint.folder.rglob("*") if f.is_file()}
    assert found.keys() == checkpoint.files.keys()
    return found


def objects(store: Store) -> set[str]:
    return {entry.name for entry in (store.root / "objects").iterdir()}


# Names


@given(paths)
def test_parse_undoes_str(path: TinkerPath):
    assert TinkerPath.parse(str(path)) == path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "tinker://",
        f"tinker://{RUN}/a",
        f"tinker://{RUN}/weights",
        f"tinker://{RUN}/weights/",
        f"tinker://{RUN}/weights/a/b",
        f"tinker://{RUN}/weights/..",
        f"tinker://{RUN}/weights/a ",
        f"tinker://{RUN}/weights/a\n",
        f" tinker://{RUN}/weights/a",
        f"{RUN}/weights/a",
        f"http://{RUN}/weights/a",
        f"tinker://{RUN}/snapshots/a",
        f"tinker://{RUN}/other/a",
        "tinker://../weights/a",
        "tinker://0123ABCD:train:1/weights/a",
        "tinker://0123abcd:train:x/weights/a",
    ],
)
def test_a_path_of_another_form_is_refused_with_the_grammar(text: str):
    grammar = r"use tinker://<training run id>/<weights\|sampler_weights\|external_weights>/<name>"
    with pytest.raises(ValueError, match=grammar):
        TinkerPath.parse(text)


def test_a_bad_name_is_refused_with_the_name_and_the_rule():
    assert check_name("step-000020_v1.5") == "step-000020_v1.5"
    for name in ["", ".", "..", ".a", "a/b", "a b", "a\n", "é", "x" * 129]:
        with pytest.raises(ValueError, match="no leading dot") as caught:
            check_name(name)
        assert repr(name) in str(caught.value)


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory):
    """One store for all the examples of a property, in a folder of its own two levels down."""
    with Store(tmp_path_factory.mktemp("outer") / "deep" / "state") as store:
        yield store


@settings(max_examples=200, deadline=None)
@given(run_id=st.just(RUN) | hostile, segment=st.just("weights") | hostile, name=st.just("a") | names | hostile)
def test_no_client_string_leads_out_of_the_state_directory(one_store: Store, run_id: str, segment: str, name: str):
    store, deep = one_store, one_store.root.parent
    for attempt in (
        lambda: store.write(TinkerPath(run_id, segment, name), {"f": b"x"}, meta={}),
        lambda: store.write(TinkerPath.parse(f"tinker://{run_id}/{segment}/{name}"), {"f": b"x"}, meta={}),
        lambda: store.write(A, {name: b"x"}, meta={}, overwrite=True),
        lambda: store.write(A, {f"{segment}/f": b"x"}, meta={}, overwrite=True),
        lambda: store.put_run(run_id, {"base_model": name}),
        lambda: store.run(run_id),
        lambda: store.list(run_id),
        lambda: store.write_snapshot(run_id, {"f": b"x"}, meta={}),
    ):
        try:
            attempt()
        except ValueError:
            pass
        except AssertionError:
            assert segment == "snapshots"  # only the server can ask for that
    assert os.listdir(deep.parent) == ["deep"] and os.listdir(deep) == ["state"]
    assert set(os.listdir(store.root)) == {"lock", "objects", "runs"}
    assert all(re.fullmatch("[0-9a-f]{28}", folder) for folder in objects(store))


def ten_thousand_ids(_: int) -> list[str]:
    return [new_id() for _ in range(10_000)]


def test_ids_never_repeat_in_two_processes_at_once_and_sort_by_time():
    with spawn.Pool(2) as pool:
        first, second = pool.map(ten_thousand_ids, range(2), chunksize=1)
    assert len({*first, *second}) == 20_000
    assert all(i.isalnum() and i == i.lower() and len(i) == 28 for i in (*first, *second))
    earlier = new_id("s")
    time.sleep(0.002)
    assert earlier < new_id("s") and earlier[0] == "s"


# Round trips


def test_a_checkpoint_comes_back_as_written_in_another_process_life(tmp_path: Path):
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    files = {"adapter": weights, "empty": np.zeros((0, 4)), "deep/er/bytes": b"\0\xff"}
    with Store(tmp_path) as store:
        written = store.write(A, files, meta={"step": 3}, user_metadata={"note": "é"}, public=True)
        assert store.open(A) == written
    with Store(tmp_path) as store:
        checkpoint = store.open(A)
        assert checkpoint == written
        assert contents(checkpoint) == {"adapter": weights.tobytes(), "empty": b"", "deep/er/bytes": b"\0\xff"}
        assert (checkpoint.size_bytes, checkpoint.meta, checkpoint.public) == (24 + 0 + 2, {"step": 3}, True)
        assert checkpoint.created.tzinfo is not None and checkpoint.expires_at is None


@settings(max_examples=50, deadline=None)
@given(meta=st.dictionaries(st.text(), json_values), user=st.none() | st.dictionaries(st.text(), json_values))
def test_any_json_comes_back_as_metadata(one_store: Store, meta: dict, user: dict | None):
    one_store.write(A, {"f": b"x"}, meta=meta, user_metadata=user, overwrite=True)
    one_store.put_run(RUN, meta)
    checkpoint = one_store.open(A)
    assert (checkpoint.meta, checkpoint.user_metadata, one_store.run(RUN)) == (meta, user, meta)


def test_one_name_may_stand_for_both_kinds(store: Store):
    training, sampler = TinkerPath(RUN, "weights", "000020"), TinkerPath(RUN, "sampler_weights", "000020")
    store.write(training, OLD, meta={})
    store.write(sampler, NEW, meta={})
    assert contents(store.open(training)) == OLD and contents(store.open(sampler)) == NEW


def test_overwriting_needs_to_be_asked_for_and_takes_a_new_folder(store: Store):
    old = store.write(A, OLD, meta={"step": 1}, user_metadata={"x": 1}, ttl_seconds=60)
    with pytest.raises(ValueError, match=f"{A} exists: choose another name or overwrite=True"):
        store.write(A, NEW, meta={})
    assert contents(store.open(A)) == OLD and objects(store) == {old.folder.name}
    new = store.write(A, NEW, meta={"step": 2}, overwrite=True)
    assert new.folder != old.folder and not old.folder.exists()
    assert contents(store.open(A)) == NEW
    assert (new.meta, new.user_metadata, new.expires_at) == ({"step": 2}, None, None)


def test_lists_are_newest_first_and_by_run(store: Store):
    other = TinkerPath("0123abcd:train:2", "weights", "c")
    for path in (A, other, B):
        store.write(path, OLD, meta={})
    store.set_ttl(A, 60)  # a change of the manifest does not make a checkpoint newer
    assert [c.path for c in store.list()] == [B, other, A]
    assert [c.path for c in store.list(RUN)] == [B, A]
    assert store.list("0123abcd:train:3") == []


def test_an_unknown_checkpoint_is_answered_with_at_most_five_known_ones(store: Store):
    with pytest.raises(ValueError, match=f"unknown checkpoint {A}: its run has 0, newest first: none"):
        store.open(A)
    for n in range(7):
        store.write(TinkerPath(RUN, "weights", f"n{n}"), OLD, meta={})
    for ask in (store.open, store.delete, lambda p: store.set_ttl(p, 5), lambda p: store.set_public(p, True)):
        with pytest.raises(ValueError, match=f"unknown checkpoint {A}: its run has 7") as caught:
            ask(A)
        assert [f"n{n}" in str(caught.value) for n in range(7)] == [False, False, True, True, True, True, True]


def test_a_deleted_checkpoint_is_gone_with_its_files(store: Store):
    store.write(A, OLD, meta={})
    kept = store.write(B, NEW, meta={})
    store.delete(A)
    assert [c.path for c in store.list()] == [B] and objects(store) == {kept.folder.name}


def test_publishing_can_be_undone(store: Store):
    written = store.write(A, OLD, meta={"step": 1})
    store.set_public(A, True)
    assert store.open(A).public
    store.set_public(A, False)
    assert store.open(A) == written


def test_runs_are_kept_newest_first_and_may_be_described_anew(store: Store):
    assert store.run(RUN) is None and store.runs() == []
    store.put_run(RUN, {"base_model": "demo"})
    store.put_run("0123abcd:train:2", {"base_model": "other"})
    store.put_run(RUN, {"base_model": "demo", "lora_rank": 8})
    assert store.run(RUN) == {"base_model": "demo", "lora_rank": 8}
    assert [run_id for run_id, _ in store.runs()] == ["0123abcd:train:2", RUN]


# Snapshots


def test_a_snapshot_is_not_listed_and_ends_with_its_store(tmp_path: Path):
    with Store(tmp_path) as store:
        kept = store.write(A, OLD, meta={})
        first, second = (store.write_snapshot(RUN, NEW, meta={"step": n}) for n in range(2))
        assert first.path == TinkerPath(RUN, "snapshots", first.folder.name) and first.folder != second.folder
        assert contents(first) == NEW and first.meta == {"step": 0}
        assert [c.path for c in store.list()] == [A]
        store.remove_snapshot(first)
        assert objects(store) == {kept.folder.name, second.folder.name}
    with Store(tmp_path) as store:
        assert objects(store) == {kept.folder.name}


def test_a_sealed_snapshot_is_there_for_the_next_process_as_long_as_somebody_remembers_it(tmp_path: Path):
    with Store(tmp_path) as store:
        kept, forgotten = (store.write_snapshot(RUN, NEW, meta={"step": n}) for n in range(2))
        store.seal(kept)
        store.seal(forgotten)
        store.write_snapshot(RUN, NEW, meta={})  # is not sealed
        assert store.list() == []
    with Store(tmp_path) as store:
        assert objects(store) == {kept.folder.name, forgotten.folder.name}
        store.keep_snapshots({kept.path.name})
        assert objects(store) == {kept.folder.name}
        found = store.open(kept.path)
        assert contents(found) == NEW and found.meta == {"step": 0}
        next(found.folder.iterdir()).write_bytes(b"torn")
    with Store(tmp_path) as store, pytest.raises(RuntimeError, match="damaged"):
        store.open(kept.path)


# The journal


def test_a_journal_gives_back_what_was_added_in_its_order_but_for_what_was_dropped(tmp_path: Path):
    journal = Journal(tmp_path)
    for seq in range(5):
        journal.add("payload", "a", seq, bytes([seq]))
    journal.add("request", "a", 2**63 - 2, b"")
    journal.add("payload", "b")
    journal.drop("payload", "a", below=3)
    journal.drop("payload", "a", seq=4)
    journal.durable().result()
    journal.close()
    journal = Journal(tmp_path)
    kept = [Record("payload", "a", 3, b"\3"), Record("request", "a", 2**63 - 2, b""), Record("payload", "b", 0, b"")]
    assert journal.records() == kept
    journal.add("later", "a")
    journal.close()
    journal = Journal(tmp_path)
    assert journal.records() == [*kept, Record("later", "a", 0, b"")]
    journal.close()


def add_until_killed(root: Path, told: Connection) -> None:
    journal = Journal(root)
    for seq in count():
        journal.add("payload", "a", seq, random.Random(seq).randbytes(500))
        if seq % 3 == 0:
            journal.durable().result()
            told.send(seq)


def test_what_was_durable_is_there_when_the_process_was_killed(tmp_path: Path):
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=add_until_killed, args=(tmp_path, theirs))
    process.start()
    while (last := mine.recv()) < 300:
        pass
    process.kill()
    process.join()
    while mine.poll():
        last = mine.recv()
    journal = Journal(tmp_path)
    records = journal.records()
    journal.close()
    assert [record.seq for record in records] == list(range(len(records))) and last < len(records)
    assert all(record.body == random.Random(record.seq).randbytes(500) for record in records)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_journal_is_an_error_or_whole_up_to_some_moment(tmp_path: Path, damage: str):
    journal = Journal(tmp_path)
    for seq in range(200):
        journal.add("payload", "ab"[seq % 2], seq, random.Random(seq).randbytes(seq * 7))
        if seq % 10 == 9:
            journal.durable().result()
    whole = journal.records()
    copies = {name: (tmp_path / name).read_bytes() for name in ("journal.sqlite", "journal.sqlite-wal")}
    journal.close()
    copies["closed"] = (tmp_path / "journal.sqlite").read_bytes()
    dice, outcomes = random.Random(5), Counter()
    for _ in range(150):
        root = tmp_path / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        name = dice.choice(list(copies))
        for each in ("journal.sqlite", "journal.sqlite-wal") if name != "closed" else ("closed",):
            content = bytearray(copies[each])
            at = dice.randrange(len(content))
            if each == name and damage == "flip":
                content[at] ^= 1 << dice.randrange(8)
            elif each == name:
                del content[at:]
            (root / each.replace("closed", "journal.sqlite")).write_bytes(content)
        try:
            journal = Journal(root)
        except RuntimeError as error:
            assert "is damaged" in str(error) and str(root) in str(error)
            outcomes["refused"] += 1
            continue
        try:
            found = journal.records()
            assert found == whole[: len(found)]
            outcomes["whole" if found == whole else "shorter"] += 1
        except RuntimeError as error:
            assert "is damaged" in str(error)
            outcomes["refused"] += 1
        finally:
            journal.close()
    assert outcomes["refused"] > 20, outcomes


def test_a_journal_that_cannot_be_written_says_so_and_lets_its_callers_go_on(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.add("payload", "a", 1)
    journal.durable().result()
    (pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count = {pages}").fetchall()  # as a full disk
    journal.add("payload", "a", 2, bytes(100_000))
    journal.durable().result()
    assert "full" in journal.trouble
    journal._database.execute("PRAGMA max_page_count = 1000000").fetchall()
    journal.add("payload", "a", 3)
    while journal.trouble:
        time.sleep(0.01)
    assert [record.seq for record in journal.records()] == [1, 2, 3]
    journal.close()


def test_a_journal_larger_than_its_bound_takes_no_more(tmp_path: Path):
    journal = Journal(tmp_path, most_bytes=1 << 20)
    journal.check_room()
    journal.add("payload", "a", 0, bytes(2 << 20))
    journal.durable().result()
    with pytest.raises(Full, match="2 of 1 MiB"):
        journal.check_room()
    journal.drop("payload", "a")
    journal.durable().result()
    journal.check_room()
    journal.close()


# The mirror


@pytest.fixture(params=["folder", "bucket"])
def root_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a mirror lies: a folder, or Cloud Storage as its emulator serves it."""
    return str(tmp_path / "root") if request.param == "folder" else f"{request.getfixturevalue('bucket')}/{new_id()}"


def tree(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {name: folder / name for name in files}


def read_tree(folder: Path) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files_under(folder).items()}


def test_a_tree_comes_back_as_it_was_and_only_new_bytes_are_sent(root_url: str, tmp_path: Path):
    files, mirror = {"a": b"1" * 1000, "deep/b": b"2" * 500, "deep/same": b"1" * 1000, "none": b""}, Mirror(root_url)
    assert mirror.push("xla", tree(tmp_path / "here", files)) == 1500
    assert mirror.push("xla", tree(tmp_path / "here", files | {"c": b"3"})) == 1
    assert Mirror(root_url).push("models", tree(tmp_path / "here", files)) == 0  # another tree, another process
    there = tmp_path / "there"
    assert Mirror(root_url).pull("xla", there) == []
    assert read_tree(there) == files | {"c": b"3"}
    tree(there, {"a": b"damaged"})
    assert Mirror(root_url).pull("xla", there) == [] and read_tree(there) == files | {"c": b"3"}
    with pytest.raises(FileNotFoundError, match="no other"):
        Mirror(root_url).pull("other", there)


def test_what_is_torn_there_is_never_restored(root_url: str, tmp_path: Path):
    mirror = Mirror(root_url)
    mirror.push("xla", tree(tmp_path / "here", {"a": b"old", "b": b"kept"}))
    mirror.push("xla", tree(tmp_path / "here", {"a": b"new", "b": b"kept"}))
    entries = mirror.newest("xla")
    mirror.files.pipe_file(f"{mirror.root}/blobs/{entries['a']['sha256']}", b"nev")
    assert Mirror(root_url).pull("xla", tmp_path / "there") == ["a"]
    assert read_tree(tmp_path / "there") == {"b": b"kept"}
    newest = mirror._manifests("xla")[-1]
    mirror.files.pipe_file(newest, mirror.files.cat_file(newest)[:-20])
    assert Mirror(root_url).pull("xla", tmp_path / "older") == []
    assert read_tree(tmp_path / "older") == {"a": b"old", "b": b"kept"}


def test_an_older_writer_that_still_runs_does_not_put_itself_before_a_newer_one(root_url: str, tmp_path: Path):
    older, newer = Mirror(root_url), Mirror(root_url)
    newer.push("xla", tree(tmp_path / "here", {"a": b"newer"}))
    older.push("xla", tree(tmp_path / "here", {"a": b"older"}))
    Mirror(root_url).pull("xla", tmp_path / "there")
    assert read_tree(tmp_path / "there") == {"a": b"newer"}


def test_blobs_that_nothing_names_are_removed_when_they_are_old(root_url: str, tmp_path: Path):
    mirror = Mirror(root_url)
    for content in (b"1", b"2", b"3", b"4"):
        mirror.push("xla", tree(tmp_path / "here", {"a": content}))
    mirror.push("models", tree(tmp_path / "here", {"m": b"5"}))
    assert mirror.collect_garbage() == 0
    assert mirror.collect_garbage(older_than_s=0) == 2  # the newest two manifests are kept
    assert Mirror(root_url).pull("xla", tmp_path / "there") == []


class Protected:
    """A state directory in use, and a mirror that follows when it is told to."""

    def __init__(self, root: Path, url: str):
        self.store, self.journal = Store(root), Journal(root)
        self.protector = Protector(Mirror(url), root, self.journal, {})

    def close(self) -> None:
        self.journal.close()
        self.protector.close(60)
        self.store.close()


def test_a_lost_machines_state_is_restored_as_it_was_at_one_moment(root_url: str, tmp_path: Path):
    lost = Protected(tmp_path / "lost", root_url)
    lost.store.put_run(RUN, {"lora_rank": 8})
    for step in range(3):
        lost.store.write(B, NEW, meta={"step": step}, overwrite=True)
        lost.journal.add("state", RUN, step, b"x" * 100)
        lost.journal.drop("state", RUN, below=step)
        lost.journal.durable().result()
        lost.protector.push_state()
    lost.journal.add("state", RUN, 99)  # after the last second
    records = lost.journal.records()
    assert lost.protector.trouble == "" and len(list((tmp_path / "lost" / "segments").iterdir())) == 3
    restore_state(Mirror(root_url), tmp_path / "found")
    journal = Journal(tmp_path / "found")
    assert journal.records() == [record for record in records if record.seq == 2]
    journal.close()
    with Store(tmp_path / "found") as store:
        assert contents(store.open(B)) == NEW and store.open(B).meta == {"step": 2} and len(objects(store)) == 1
    lost.close()


def test_a_server_that_was_replaced_stops_writing(root_url: str, tmp_path: Path):
    old = Protected(tmp_path / "old", root_url)
    old.protector.push_state()
    restore_state(Mirror(root_url), tmp_path / "new")
    new = Protected(tmp_path / "new", root_url)
    new.protector.push_state()
    with pytest.raises(RuntimeError, match="another server"):
        old.protector.push_state()
    new.protector.push_state()
    for each in (old, new):
        each.close()


@contextlib.contextmanager
def clock_set_back():
    now = time.time_ns
    time.time_ns = lambda: now() - 3600 * 10**9
    try:
        yield
    finally:
        time.time_ns = now


def restored(root_url: str, to: Path) -> list[int]:
    """The seq of each record that another machine would have."""
    restore_state(Mirror(root_url), to)
    journal = Journal(to)
    try:
        return [record.seq for record in journal.records()]
    finally:
        journal.close()


def test_a_clock_that_is_set_back_hides_nothing_newer(root_url: str, tmp_path: Path):
    first = Protected(tmp_path / "first", root_url)
    first.journal.add("x", "a", 0)
    first.journal.durable().result()
    first.protector.push_state()
    with clock_set_back():
        for seq in (1, 2, 3):
            first.journal.add("x", "a", seq)
            first.journal.durable().result()
            first.protector.push_state()
        assert restored(root_url, tmp_path / "next") == [0, 1, 2, 3]
        following = Protected(tmp_path / "next", root_url)
        following.journal.add("x", "a", 4)
        following.journal.durable().result()
        following.protector.push_state()
        following.protector.push_state()
    with pytest.raises(RuntimeError, match="another server"):
        first.protector.push_state()
    assert restored(root_url, tmp_path / "last") == [0, 1, 2, 3, 4]
    for each in (first, following):
        each.close()


def test_a_kill_right_after_the_first_manifest_does_not_end_the_protection(tmp_path: Path, monkeypatch):
    killed = Protected(tmp_path / "here", str(tmp_path / "root"))
    pipe_file = killed.protector.mirror.files.pipe_file
    monkeypatch.setattr(killed.protector.mirror.files, "pipe_file", lambda *args: (pipe_file(*args), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        killed.protector.push_state()
    monkeypatch.undo()
    killed.journal.close()
    killed.store.close()
    again = Protected(tmp_path / "here", str(tmp_path / "root"))
    again.protector.push_state()
    again.close()


def test_a_root_that_has_gone_is_said(tmp_path: Path, monkeypatch):
    server = Protected(tmp_path / "here", str(tmp_path / "root"))

    def gone(*_):
        raise FileNotFoundError("the bucket")

    monkeypatch.setattr(server.protector.mirror.files, "pipe_file", gone)
    assert not server.protector._tried(server.protector.push_state) and "the bucket" in server.protector.trouble
    server.close()


def test_an_unreachable_mirror_is_said_and_caught_up_with(tmp_path: Path):
    (tmp_path / "root").write_text("not a folder")
    server = Protected(tmp_path / "here", str(tmp_path / "root"))
    for seq in range(3):
        server.journal.add("payload", "a", seq)
        server.journal.durable().result()
        assert not server.protector._tried(server.protector.push_state)
    assert "is behind" in server.protector.trouble
    (tmp_path / "root").unlink()
    assert server.protector._tried(server.protector.push_state) and server.protector.trouble == ""
    restore_state(Mirror(str(tmp_path / "root")), tmp_path / "there")
    journal = Journal(tmp_path / "there")
    assert [record.seq for record in journal.records()] == [0, 1, 2]
    journal.close()
    server.close()


def test_a_cached_file_that_is_not_as_it_was_sealed_is_removed(tmp_path: Path):
    tree(tmp_path, {"a": b"1", "b": b"2", "c/d": b"3"})
    seal_folder(tmp_path)
    assert check_folder(tmp_path) == 0
    tree(tmp_path, {"b": b"3", "new": b"4"})
    assert check_folder(tmp_path) == 2 and {"a", "c/d", ".sealed.json"} == set(files_under(tmp_path))
    (tmp_path / ".sealed.json").write_text("{}")
    assert check_folder(tmp_path) == 2
    assert check_folder(tmp_path / "nowhere") == 0


def test_what_a_state_directory_holds_is_told_and_what_is_damaged_in_it(tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(ValueError, match="no state directory"):
        main(Command(action="status", state_dir=tmp_path / "mistyped"))
    assert not (tmp_path / "mistyped").exists()
    here = Protected(tmp_path / "here", str(tmp_path / "root"))
    kept, torn = (here.store.write(path, NEW, meta={}) for path in (A, B))
    here.journal.add("session", "0123abcd", 0, b"[null, null]")
    here.journal.add("run", RUN, 0, b'["0123abcd", {}]')
    here.journal.add("request", RUN, 1, b"optim_step r1")
    here.close()
    mirror = dict(mirror=str(tmp_path / "root"))
    assert main(Command(action="push", state_dir=tmp_path / "here", **mirror)) == 0
    assert main(Command(action="restore", state_dir=tmp_path / "there", **mirror)) == 0
    told = capsys.readouterr().out
    assert str(A) in told and "1 sessions that have not ended" in told and "1 waiting ['optim_step']" in told
    (torn.folder / "extra").write_bytes(b"?")
    assert main(Command(action="status", state_dir=tmp_path / "here")) == 1
    assert f"DAMAGED: {torn.folder / 'extra'}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--mirror is unset"):
        main(Command(action="push", state_dir=tmp_path / "here"))


# Time to live


def test_an_expired_checkpoint_is_unknown_and_its_files_go(store: Store):
    a, b, c = (TinkerPath(RUN, "weights", name) for name in "abc")
    for path in (a, b):
        store.write(path, OLD, meta={}, ttl_seconds=1)
    store.write(c, OLD, meta={}, ttl_seconds=60)
    assert len(store.list()) == 3 and store.sweep() == 0
    time.sleep(1.01)
    assert [checkpoint.path for checkpoint in store.list()] == [c]
    with pytest.raises(ValueError, match="unknown checkpoint"):
        store.open(a)
    assert len(objects(store)) == 2  # open removed a; b waits for the sweep
    assert store.sweep() == 1 and store.sweep() == 0
    assert objects(store) == {store.open(c).folder.name}
    store.write(a, NEW, meta={})  # the name is free again
    assert contents(store.open(a)) == NEW


def test_a_ttl_counts_from_when_it_is_set_and_can_be_taken_back(store: Store):
    written = store.write(A, OLD, meta={})
    store.set_ttl(A, 100)
    expires_at = store.open(A).expires_at
    assert expires_at is not None and 99 < (expires_at - written.created).total_seconds() < 110
    store.set_ttl(A, None)
    assert store.open(A) == written


@pytest.mark.parametrize("seconds", [0, -1, 10 * 365 * 24 * 3600 + 1])
def test_a_ttl_out_of_range_is_refused_and_changes_nothing(store: Store, seconds: int):
    written = store.write(A, OLD, meta={})
    with pytest.raises(ValueError, match=f"bad ttl_seconds {seconds}: use 1 to 315360000"):
        store.write(B, OLD, meta={}, ttl_seconds=seconds)
    with pytest.raises(ValueError, match="bad ttl_seconds"):
        store.set_ttl(A, seconds)
    assert store.list() == [written] and objects(store) == {written.folder.name}


# Damage


@pytest.fixture(scope="module")
def damageable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage")
    with Store(root) as store:
        store.put_run(RUN, {"base_model": "demo"})
        store.write(A, {"adapter": b"some weights", "deep/moments": b"m"}, meta={"step": 7, "x": 1.5})
        store.write(B, OLD, meta={})
    return root


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_one_flipped_bit_or_lost_byte_is_an_error_that_names_the_file(damageable: Path, data: st.DataObject):
    with Store(damageable) as store:
        folder, other = store.open(A).folder, store.open(B)
    manifest, run_file = (damageable / "runs" / RUN.replace(":", "-") / name for name in ("weights/a.json", "run.json"))
    file = data.draw(st.sampled_from([manifest, run_file, folder / "adapter", folder / "deep/moments"]))
    whole = file.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytes(byte ^ (1 << bit % 8) if n == bit // 8 else byte for n, byte in enumerate(whole))
    try:
        file.write_bytes(data.draw(st.sampled_from([flipped, whole[: bit // 8], whole + b"\0"])))
        with Store(damageable) as store:
            with pytest.raises(RuntimeError) as caught:
                store.run(RUN) if file == run_file else store.open(A)
            assert str(file) in str(caught.value)
            assert [c.path for c in store.list()] == ([B] if file == manifest else [B, A])
            assert [run_id for run_id, _ in store.runs()] == ([] if file == run_file else [RUN])
            assert store.open(B) == other
    finally:
        file.write_bytes(whole)


def test_a_vanished_file_is_an_error_that_names_it(damageable: Path, tmp_path: Path):
    shutil.copytree(damageable, tmp_path / "copy")
    with Store(tmp_path / "copy") as store:
        (store.list()[-1].folder / "adapter").unlink()
        with pytest.raises(RuntimeError, match="adapter"):
            store.open(A)


def test_no_object_is_removed_while_a_manifest_that_may_name_it_is_damaged(damageable: Path, tmp_path: Path, caplog):
    shutil.copytree(damageable, tmp_path / "copy")
    manifest = tmp_path / "copy" / "runs" / RUN.replace(":", "-") / "weights" / "a.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    with Store(tmp_path / "copy") as store:
        assert len(objects(store)) == 2 and str(manifest) in caplog.text
    manifest.write_bytes(whole)
    with Store(tmp_path / "copy") as store:
        assert contents(store.open(A)) == {"adapter": b"some weights", "deep/moments": b"m"}


def test_a_manifest_in_the_place_of_another_is_not_believed(damageable: Path, tmp_path: Path):
    shutil.copytree(damageable, tmp_path / "copy")
    folder = tmp_path / "copy" / "runs" / RUN.replace(":", "-") / "weights"
    shutil.copy(folder / "a.json", folder / "c.json")
    with Store(tmp_path / "copy") as store, pytest.raises(RuntimeError, match=f"c.json is the manifest of {A}"):
        store.open(TinkerPath(RUN, "weights", "c"))


def test_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(store: Store):
    store.write(A, OLD, meta={})
    before = objects(store)
    with pytest.raises(RuntimeError, match="cannot write a checkpoint under"):
        store.write(B, {"a": b"x", "a/b": b"x"}, meta={})  # the name of a file where a folder must be: an OSError too
    assert objects(store) == before


# Threads and processes


def test_writers_of_different_names_do_not_disturb_each_other(store: Store):
    def write(n: int) -> Checkpoint:
        return store.write(TinkerPath(RUN, "weights", f"n{n}"), {"f": bytes([n]) * 10_000}, meta={"n": n})

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(write, range(32)))
    for n, checkpoint in enumerate(written):
        assert store.open(checkpoint.path) == checkpoint and contents(checkpoint) == {"f": bytes([n]) * 10_000}
    assert objects(store) == {c.folder.name for c in written} and len(store.list()) == 32


def test_of_many_writers_of_one_name_one_wins_and_the_others_are_told(store: Store):
    def write(n: int) -> Checkpoint | str:
        try:
            return store.write(A, {"f": bytes([n]) * 10_000}, meta={"n": n})
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(write, range(16)))
    (winner,) = (result for result in results if isinstance(result, Checkpoint))
    assert sum("exists" in result for result in results if isinstance(result, str)) == 15
    assert store.open(A) == winner and contents(winner) == {"f": bytes([winner.meta["n"]]) * 10_000}
    assert objects(store) == {winner.folder.name}


def test_open_always_finds_one_whole_version_while_others_overwrite_it(store: Store):
    store.write(A, {"f": b"start"}, meta={})

    def overwrite(n: int) -> None:
        store.write(A, {"f": bytes([n]) * 2_000_000}, meta={"n": n}, overwrite=True)

    with ThreadPoolExecutor(6) as pool:
        writes = [pool.submit(overwrite, n) for n in range(40)]
        while not all(write.done() for write in writes):
            assert store.open(A).files.keys() == {"f"}  # it verifies the bytes: a mixture would be a RuntimeError
            assert [c.path for c in store.list()] == [A]
        for write in writes:
            write.result()
    last = store.open(A)
    assert contents(last) == {"f": bytes([last.meta["n"]]) * 2_000_000} and objects(store) == {last.folder.name}


def hold(root: Path, ready, release) -> None:
    store = Store(root)
    ready.set()
    release.wait(20)
    os._exit(len(store.list()))  # no close: the process just ends


def test_a_second_process_is_refused_in_one_line_until_the_first_ends(tmp_path: Path):
    ready, release = spawn.Event(), spawn.Event()
    holder = spawn.Process(target=hold, args=(tmp_path, ready, release))
    holder.start()
    assert ready.wait(20)
    with pytest.raises(RuntimeError, match=f"^{tmp_path} is in use by process {holder.pid}: .*$"):
        Store(tmp_path)
    release.set()
    holder.join(20)
    with Store(tmp_path), pytest.raises(RuntimeError, match=f"in use by process {os.getpid()}"):
        Store(tmp_path)
    Store(tmp_path).close()


# Crashes


def snapshot(store: Store) -> None:
    store.remove_snapshot(store.write_snapshot(RUN, NEW, meta={}))
    store.write_snapshot(RUN, NEW, meta={})


SCENARIOS: dict[str, Callable[[Store], object]] = {
    "write": lambda store: store.write(B, NEW, meta={"step": 2}),
    "overwrite": lambda store: store.write(A, NEW, meta={"step": 2}, overwrite=True),
    "delete": lambda store: store.delete(A),
    "set_ttl": lambda store: store.set_ttl(A, 1000),
    "put_run": lambda store: store.put_run(RUN, {"lora_rank": 16}),
    "snapshot": snapshot,
}


def crash_everywhere(before: Path, crashes: Path) -> None:
    """For every scenario and k, copy the store `before` to crashes/<scenario>/<k>, and run the scenario there up to its
    k-th change of the disk; in the last copy it ends by itself."""
    for scenario, run in SCENARIOS.items():
        for k in count():
            root = shutil.copytree(before, crashes / scenario / str(k))
            pid = os.fork()
            if pid == 0:
                crash_at(k, root)
                run(Store(root))
                cut_power(root)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in {0, 9}, f"{scenario}, {k}: exit status {status}"
            if status == 0:
                break


durable: set[int] = set()  # the inodes of what would survive a power cut


def crash_at(k: int, root: Path) -> None:
    """Arrange that this process ends before its k-th change of the disk, as in a power cut."""
    changes = count()
    durable.update(file.stat().st_ino for file in root.rglob("*"))

    def change() -> None:
        if next(changes) == k:
            cut_power(root)
            os._exit(9)

    def forget(path: str | Path, dir_fd: int) -> None:
        """Its inode is about to be freed, and may serve another file, or to be written anew."""
        with contextlib.suppress(FileNotFoundError):
            durable.discard(os.stat(path, dir_fd=dir_fd if dir_fd >= 0 else None).st_ino)

    def audit(event: str, args: tuple) -> None:  # called before the event
        if event in {"os.mkdir", "os.remove", "os.rmdir", "os.rename"}:
            change()
            if event != "os.mkdir":
                forget(args[-3] if event == "os.rename" else args[0], args[-1])
        elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
            change()
            forget(args[0], -1)

    def fsync(descriptor: int) -> None:
        change()
        durable.add(os.fstat(descriptor).st_ino)

    os.fsync = fsync
    sys.addaudithook(audit)


def cut_power(root: Path) -> None:
    for file in root.rglob("*"):
        if file.is_file() and file.stat().st_ino not in durable:
            os.truncate(file, file.stat().st_size // 2)


def state(root: Path) -> list:
    """All that a client can see after a restart; no garbage may be left."""
    with Store(root) as store:
        found = [(c.path, contents(store.open(c.path)), c.meta, c.expires_at is None) for c in store.list()]
        assert objects(store) == {c.folder.name for c in store.list()}
        return [*found, store.runs()]


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crashes")
    with Store(folder / "before") as store:
        store.put_run(RUN, {"lora_rank": 8})
        store.write(A, OLD, meta={"step": 1})
        store.write_snapshot(RUN, NEW, meta={})
    (folder / "before/objects/.tmp-0123456789abcdef0123456789ab/deep").mkdir(parents=True)  # left by an earlier crash
    process = spawn.Process(target=crash_everywhere, args=(folder / "before", folder))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return folder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_crash_at_any_moment_leaves_the_old_state_or_the_new_one(crashes: Path, scenario: str):
    states = [state(crashes / scenario / str(k)) for k in range(len(os.listdir(crashes / scenario)))]
    old, new = states[0], states[-1]
    assert len(states) > 10 and old == state(crashes / "before")
    assert (old == new) == (scenario == "snapshot")
    turn = states.index(new)
    assert states == [old] * turn + [new] * (len(states) - turn)
