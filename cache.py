"""What outlives the process: checkpoints, the journal of what was promised, and a mirror of both on other disks.

    accepted -> [journal] -> answered;  optim_step -> save_weights, a snapshot -> [store] -> load_weights, the sampler
    every second: journal + store -> [mirror] -> another machine;  compiled programs, weights -> [mirror], too

Under the state directory, which one process at a time may hold:

    journal.sqlite                     sessions, requests and answers, until they are covered by a state and an hour old
    objects/<id>/...                   the files of one checkpoint, immutable; <id> is a time and a random number
    runs/<run>/run.json                what a training run is (<run> is the run id with '-' for ':')
    runs/<run>/<segment>/<name>.json   the manifest of tinker://<run id>/<segment>/<name>

Invariants
  1. A checkpoint exists from the rename of its manifest, once its files are on the disk, until the unlinking of its
     manifest, before they go. An object that no manifest names is garbage, removed when the store is opened.
  2. No folder is ever used twice: engines key their prefix caches by path.
  3. A wrong byte is never served: files, manifests and records carry a hash; a mismatch is an error that says where.
  4. No client text becomes a path unchecked: a TinkerPath with an unsafe part cannot be made.
  5. The mirror is one moment of the whole, or the one before; nobody waits for it.

Left out: counting readers: read a checkpoint as soon as it is opened; once another thread overwrites or deletes it, its
files vanish. A mirror of converted weights: a base is read from its Hugging Face files straight onto the mesh.
Run: `uv run cache.py status --state-dir state`, or `restore` and `push` with `--mirror gs://bucket/run`.
Read first: `Store.write`, `Journal`, `Protector.push_state`.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgpack
import tyro

log = logging.getLogger(__name__)

SEGMENTS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}  # -> checkpoint_type
SNAPSHOTS = "snapshots"  # the segment of what the journal names: sampler snapshots, states of adapters; clients cannot
MAX_TTL_SECONDS = 10 * 365 * 24 * 3600
Content = Buffer | Callable[[Path], object]  # of a file: bytes, a contiguous array, or what writes it
SEAL = ".sealed.json"  # what the other files of a folder are
STAGED = ".tmp-"  # what a folder's name begins with until all of its files are written


class Full(RuntimeError):
    """There is no room for more: come back later."""


def new_id(prefix: str = "") -> str:
    """The prefix and 28 hex digits that never repeat, across threads, processes and restarts, and sort by time."""
    assert re.fullmatch(r"[a-z0-9]*", prefix), prefix
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(6)}"


def check_name(name: str) -> str:
    if not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,128}", name):  # fullmatch: `$` would let "name\n" pass
        raise ValueError(f"bad name {name!r}: use 1 to 128 characters of A-Z a-z 0-9 . _ - and no leading dot")
    return name


def check_run_id(run_id: str) -> str:
    if not re.fullmatch(r"[a-z0-9]{6,40}:train:[0-9]{1,9}", run_id):
        raise ValueError(f"bad training run id {run_id!r}: use <session id>:train:<number>, as create_model answered")
    return run_id


@dataclass(frozen=True)
class TinkerPath:
    """tinker://<run id>/<segment>/<name>, of checked parts only."""

    run_id: str
    segment: str
    name: str

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        check_name(self.name)
        if self.segment not in (*SEGMENTS, SNAPSHOTS):
            raise ValueError(f"unknown kind of checkpoint {self.segment!r}: use one of {', '.join(SEGMENTS)}")

    @classmethod
    def parse(cls, text: str) -> "TinkerPath":
        parts = re.fullmatch(r"tinker://([^/]*)/([^/]*)/([^/]*)", text)
        try:
            if parts is None or parts[2] not in SEGMENTS:
                raise ValueError("it does not have these three parts")
            return cls(*parts.groups())
        except ValueError as error:
            grammar = f"tinker://<training run id>/<{'|'.join(SEGMENTS)}>/<name>"
            raise ValueError(f"bad checkpoint path {text!r}: use {grammar}; {error}") from None

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.segment}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a manifest says: one immutable version of an adapter, its files in `folder`."""

    path: TinkerPath
    folder: Path
    files: dict[str, dict[str, Any]]  # relative path -> {"bytes": int, "sha256": hex digits}
    meta: dict[str, Any]  # the server's: base_model, lora_rank, step, ...
    user_metadata: dict[str, Any] | None = None  # the client's
    created: datetime
    expires_at: datetime | None = None  # None: never
    public: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)


def expiry(ttl_seconds: int | None) -> datetime | None:
    """The moment `ttl_seconds` from now; None: never."""
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
        raise ValueError(f"bad ttl_seconds {ttl_seconds}: use 1 to {MAX_TTL_SECONDS} (10 years), or null for no end")
    return datetime.now(UTC) + timedelta(seconds=ttl_seconds)


class Store:
    """The checkpoints under one state directory; safe to call from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()  # engines are given these folders, and run elsewhere
        self._objects, self._runs = self.root / "objects", self.root / "runs"
        self._objects.mkdir(parents=True, exist_ok=True)
        self._runs.mkdir(exist_ok=True)
        _fsync(self.root)
        self._lock_file = _take_lock(self.root / "lock")
        self._mutex = threading.RLock()  # over every use of the manifests, so that each method is atomic
        self._verified: set[str] = set()  # ids of the objects that this process has checked
        self.remove_garbage()

    def close(self) -> None:
        self._lock_file.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self,
        path: TinkerPath,
        files: Mapping[str, Content],
        *,
        meta: dict[str, Any],
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, Any] | None = None,
        public: bool = False,
    ) -> Checkpoint:
        """Keep `files` (by relative path) under `path`: all of them, or none."""
        expires_at = expiry(ttl_seconds)
        self._occupant(path, overwrite)  # refuse before gigabytes are written, and once more when they are
        with self._staged(files) as (staged, entries):
            for written in (*staged.rglob("*"), staged):
                _fsync(written)
            with self._mutex:
                old = self._occupant(path, overwrite)
                folder = staged.rename(self._objects / staged.name.removeprefix(STAGED))
                _fsync(self._objects)  # the manifest must not reach the disk before what it names
                self._put_manifest(
                    Checkpoint(
                        path=path,
                        folder=folder,
                        files=entries,
                        meta=meta,
                        user_metadata=user_metadata,
                        created=datetime.now(UTC),
                        expires_at=expires_at,
                        public=public,
                    )
                )
                if old is not None:
                    self._remove_object(old.folder)
                return self.read_manifest(self._manifest_file(path))

    def write_snapshot(self, run_id: str, files: Mapping[str, Content], *, meta: dict[str, Any]) -> Checkpoint:
        """A sampler snapshot, which is read at once: nothing is fsynced or hashed, and until it is sealed it is garbage
        at the next start."""
        check_run_id(run_id)
        with self._staged(files, digest=False) as (staged, entries):
            folder = staged.rename(self._objects / staged.name.removeprefix(STAGED))
        path = TinkerPath(run_id, SNAPSHOTS, folder.name)
        return Checkpoint(path=path, folder=folder, files=entries, meta=meta, created=datetime.now(UTC))

    def seal(self, snapshot: Checkpoint) -> None:
        """Give a snapshot its manifest: the next process finds it, too. What a power cut tears its hashes tell."""
        sealed = replace(snapshot, files={name: _found(snapshot.folder / name) for name in snapshot.files})
        with self._mutex:
            self._put_manifest(sealed, sync=False)
            self._verified.add(snapshot.folder.name)

    def remove_snapshot(self, snapshot: Checkpoint) -> None:
        assert snapshot.path.segment == SNAPSHOTS, snapshot.path
        with self._mutex:
            self._manifest_file(snapshot.path).unlink(missing_ok=True)
            self._remove_object(snapshot.folder)

    def keep_snapshots(self, names: set[str]) -> None:
        """Remove every snapshot but these: nobody remembers the others."""
        with self._mutex:
            for file in self.manifest_files(segment=SNAPSHOTS):
                if file.stem not in names:
                    file.unlink()
            self.remove_garbage()

    def _occupant(self, path: TinkerPath, overwrite: bool) -> Checkpoint | None:
        with self._mutex:
            old = self.find(path)
        if old is not None and not overwrite:
            raise ValueError(f"checkpoint {path} exists: choose another name or overwrite=True")
        return old

    @contextlib.contextmanager
    def _staged(
        self, files: Mapping[str, Content], *, digest: bool = True
    ) -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
        """A folder with `files` in it, and their sizes and hashes; unless the body renames it, it is removed."""
        assert files and not self._lock_file.closed
        for part in "/".join(files).split("/"):
            check_name(part)
        staged = self._objects / f"{STAGED}{new_id()}"
        try:
            yield staged, {name: _write_file(staged / name, each, digest=digest) for name, each in files.items()}
        except OSError as error:
            raise RuntimeError(f"cannot write a checkpoint under {self.root}: {error}") from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def open(self, path: TinkerPath) -> Checkpoint:
        """The checkpoint, with its bytes checked once a process; ValueError if unknown, RuntimeError if damaged."""
        with self._mutex:  # held during the check, so that no writer removes the folder under it
            checkpoint = self._known(path)
            if checkpoint.folder.name not in self._verified:
                _verify(checkpoint)
                self._verified.add(checkpoint.folder.name)
            return checkpoint

    def delete(self, path: TinkerPath) -> None:
        with self._mutex:
            self._remove(self._known(path))

    def set_ttl(self, path: TinkerPath, seconds: int | None) -> None:
        """The checkpoint expires `seconds` from now; None: never."""
        with self._mutex:
            self._put_manifest(replace(self._known(path), expires_at=expiry(seconds)))

    def set_public(self, path: TinkerPath, public: bool) -> None:
        with self._mutex:
            self._put_manifest(replace(self._known(path), public=public))

    def sweep(self) -> int:
        """Remove the expired checkpoints; how many there were."""
        with self._mutex:
            expired = [checkpoint for checkpoint in self._readable() if checkpoint.expired]
            for checkpoint in expired:
                self._remove(checkpoint)
            return len(expired)

    def _known(self, path: TinkerPath) -> Checkpoint:
        checkpoint = self.find(path)
        if checkpoint is None:
            known = [str(other.path) for other in self.list(path.run_id)]
            newest = ", ".join(known[:5]) or "none; save one first"
            raise ValueError(f"unknown checkpoint {path}: its run has {len(known)}, newest first: {newest}")
        return checkpoint

    def find(self, path: TinkerPath) -> Checkpoint | None:
        """The checkpoint under `path`; an expired one is removed and does not count."""
        file = self._manifest_file(path)
        checkpoint = self.read_manifest(file) if file.exists() else None
        if checkpoint is not None and checkpoint.expired:
            self._remove(checkpoint)
            return None
        return checkpoint

    def _remove(self, checkpoint: Checkpoint) -> None:
        file = self._manifest_file(checkpoint.path)
        file.unlink()
        _fsync(file.parent)  # a power cut must not bring the manifest back without what it names
        self._remove_object(checkpoint.folder)

    def _remove_object(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # what resists is garbage, tried again at the next start
        self._verified.discard(folder.name)

    def remove_garbage(self) -> None:
        try:
            named = {self.read_manifest(file).folder.name for file in self.manifest_files()}
        except RuntimeError as error:
            log.warning("unnamed objects are kept, since a manifest that may name one is unreadable: %s", error)
            return
        for entry in self._objects.iterdir():
            if re.fullmatch(rf"({re.escape(STAGED)})?[0-9a-f]{{28}}", entry.name) and entry.name not in named:
                self._remove_object(entry)

    def put_run(self, run_id: str, info: dict[str, Any]) -> None:
        """Keep, or replace, what is known of a run (base_model, lora_rank, ...)."""
        with self._mutex:
            file = self._run_file(run_id)
            created = _read_sealed(file)["created"] if file.exists() else datetime.now(UTC).isoformat()
            self._put_sealed(file, {"run_id": run_id, "created": created, "info": info})

    def run(self, run_id: str) -> dict[str, Any] | None:
        with self._mutex:
            file = self._run_file(run_id)
            return _read_sealed(file)["info"] if file.exists() else None

    def runs(self) -> list[tuple[str, dict[str, Any]]]:
        """(run id, info) of every run, newest first."""
        with self._mutex:
            records = list(_read_all(_read_sealed, self._runs.glob("*/run.json")))
        records.sort(key=lambda record: record["created"], reverse=True)
        return [(record["run_id"], record["info"]) for record in records]

    def _run_file(self, run_id: str) -> Path:
        return self._runs / check_run_id(run_id).replace(":", "-") / "run.json"

    def _manifest_file(self, path: TinkerPath) -> Path:
        return self._run_file(path.run_id).with_name(path.segment) / f"{path.name}.json"

    def manifest_files(self, run_id: str | None = None, segment: str = "*") -> Iterator[Path]:
        return self._runs.glob(f"{'*' if run_id is None else self._run_file(run_id).parent.name}/{segment}/*.json")

    def _put_manifest(self, checkpoint: Checkpoint, *, sync: bool = True) -> None:
        record = {**vars(checkpoint), "path": str(checkpoint.path), "folder": checkpoint.folder.name}
        for key in ("created", "expires_at"):
            record[key] = record[key] and record[key].isoformat()
        self._put_sealed(self._manifest_file(checkpoint.path), record, sync=sync)

    def read_manifest(self, file: Path) -> Checkpoint:
        record = _read_sealed(file)
        record["path"] = TinkerPath(*record["path"].removeprefix("tinker://").split("/"))
        record["folder"] = self._objects / record["folder"]
        for key in ("created", "expires_at"):
            record[key] = record[key] and datetime.fromisoformat(record[key])
        if self._manifest_file(record["path"]) != file:
            raise RuntimeError(f"{file} is the manifest of {record['path']}, in the wrong place: move it back")
        return Checkpoint(**record)

    def _put_sealed(self, file: Path, record: dict[str, Any], *, sync: bool = True) -> None:
        """Write the record with its sha256: after a crash, `file` holds the old text or the new one."""
        staged = self.root / "manifest.tmp"  # one name is enough: the mutex is held
        staged.write_text(_sealed(record))
        if sync:
            _fsync(staged)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, file)
        for folder in (file.parent, file.parent.parent, self._runs) if sync else ():  # each may have a new name in it
            _fsync(folder)

    def _readable(self, run_id: str | None = None) -> Iterator[Checkpoint]:
        return _read_all(self.read_manifest, self.manifest_files(run_id))

    def list(self, run_id: str | None = None) -> list[Checkpoint]:  # stays last: `list[...]` below it would mean itself
        """The checkpoints of one run, or of all, newest first; a damaged one is logged and left out."""
        with self._mutex:
            live = [each for each in self._readable(run_id) if not each.expired and each.path.segment in SEGMENTS]
        return sorted(live, key=lambda checkpoint: checkpoint.created, reverse=True)


# ---- the journal


# Of a session, a run (an adapter in training) or a sampler, which own their requests; a request owns its "answer".
KINDS = "session", "end", "run", "state", "shared", "loaded", "sampler", "retired", "forgotten", "request", "payload"


@dataclass(frozen=True, slots=True)
class Record:
    kind: str
    owner: str
    seq: int
    body: bytes


SCHEMA = """
CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY, kind TEXT, owner TEXT, seq INTEGER, body BLOB, digest BLOB);
CREATE INDEX IF NOT EXISTS by_owner ON records (owner, kind, seq);
"""
INSERT = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)"
DELETE = "DELETE FROM records WHERE owner = ? AND kind = ? AND seq BETWEEN ? AND ?"
SIZES = ("page_count", "freelist_count", "page_size")
HELD_BYTES = 256 << 20  # of records that cannot be written, in memory: then no more is written at all
NOTHING_TO_DO: Future = Future()
NOTHING_TO_DO.set_result(None)
# A record and its number, or what to drop (owner, kind, first seq, last seq) and 0.
Change = tuple[Record | tuple[str, str, int, int], int]


class Journal:
    """What the server has promised, and what came of it: records, in the order in which they were added.

    `add` and `drop` only note a change: a thread of its own commits all that are noted, and `durable` waits for that.
    When it cannot write, `trouble` says why; it tries again, and what is there is always whole up to some moment.
    """

    def __init__(self, root: Path, *, most_bytes: int = 8 << 30) -> None:
        self.file, self.most_bytes, self.live_bytes = root / "journal.sqlite", most_bytes, 0
        self.trouble = ""
        self.together = threading.RLock()  # what is noted while it is held is committed at once, or not at all
        self._noted = threading.Event()
        self._changes: list[Change] = []  # noted, not yet committed
        self._batch: Future = Future()  # done when they are
        self._committing: Future | None = None
        self._closing = False
        self._taken: list[Change] | None = None  # committed since the last `take`; None: too much, or nobody takes
        try:
            self._database = sqlite3.connect(self.file, check_same_thread=False, isolation_level=None)
            for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                self._database.execute(f"PRAGMA {pragma}")
            self._database.executescript(SCHEMA)
            ((said,),) = self._database.execute("PRAGMA integrity_check(1)").fetchall()
            if said != "ok":
                raise sqlite3.DatabaseError(said)
            ((last,),) = self._database.execute("SELECT coalesce(max(id), 0) FROM records").fetchall()
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        self._ids = itertools.count(last + 1)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _damaged(self, error: object) -> RuntimeError:
        remedy = "restore it from a mirror, or move it away: checkpoints stay, what was in training is then forgotten"
        return RuntimeError(f"{self.file} is damaged ({error}): {remedy}")

    def records(self) -> list[Record]:
        """All of them, oldest first. RuntimeError: one is not as it was written."""
        records = []
        try:
            for number, *values, digest in self._database.execute("SELECT * FROM records ORDER BY id"):
                record = Record(*values)
                if digest != _record_digest(number, record):
                    raise self._damaged(f"record {number}")
                records.append(record)
        except (sqlite3.Error, OverflowError, TypeError) as error:
            raise self._damaged(error) from error
        return records

    def add(self, kind: str, owner: str, seq: int = 0, body: bytes = b"") -> None:
        with self.together:
            self._note(Record(kind, owner, seq, body), next(self._ids))

    def drop(self, kind: str, owner: str, *, seq: int | None = None, below: int = 2**63) -> None:
        """Forget the owner's records of this kind: the one numbered `seq`, or all that are numbered lower."""
        with self.together:
            self._note((owner, kind, *((0, below - 1) if seq is None else (seq, seq))), 0)

    def _note(self, *change: Any) -> None:
        self._changes.append(change)
        self._noted.set()

    def durable(self) -> Future:
        """Done when all that was noted before has been committed, or could not be."""
        with self.together:
            return self._batch if self._changes else self._committing if self._committing else NOTHING_TO_DO

    def take(self) -> list[Change] | None:
        """What was committed since the last call; None: the whole has to be copied."""
        with self.together:
            taken, self._taken = self._taken, []
            return taken

    def copy(self, file: Path) -> None:
        """The database as it is at some moment from now on."""
        with contextlib.closing(sqlite3.connect(self.file)) as database:
            database.execute("VACUUM INTO ?", (str(file),))

    def check_room(self) -> None:
        if self.live_bytes > self.most_bytes:
            limit = f"{self.most_bytes >> 20} MiB (--journal-mb)"
            raise Full(
                f"the journal holds {self.live_bytes >> 20} of {limit}: results go after an hour; come back later"
            )

    def close(self) -> None:
        self._closing = True
        self._noted.set()
        self._thread.join()
        self._database.close()

    def _run(self) -> None:
        held, given_up = [], False  # what could not be written yet
        while not (self._closing and not self._changes):
            self._noted.wait(1.0 if held else None)
            with self.together:
                self._noted.clear()
                changes, self._changes = self._changes, []
                committed = self._committing = self._batch
                self._batch = Future()
            held += changes if not given_up else []
            try:
                self._commit(held)
                if held and self.trouble:
                    log.warning("the journal is written again")
                    self.trouble = ""
                held = []
            except sqlite3.Error as error:
                if not self.trouble:
                    log.error(
                        "%s cannot be written: %s; what is accepted now would be lost in a crash", self.file, error
                    )
                self.trouble = f"{self.file.name}: {error}"
                given_up = given_up or sum(len(each.body) for each, _ in held if isinstance(each, Record)) > HELD_BYTES
                held = [] if given_up or self._closing else held  # a hole would be worse than an early end
            self._committing = None
            committed.set_result(None)

    def _commit(self, changes: list[Change]) -> None:
        if not changes:
            return
        apply_changes(self._database, changes)
        with self.together:
            if self._taken is not None:
                self._taken += changes
                if sum(len(each.body) for each, _ in self._taken if isinstance(each, Record)) > HELD_BYTES:
                    self._taken = None
        pages, free, size = (self._database.execute(f"PRAGMA {what}").fetchone()[0] for what in SIZES)
        self.live_bytes = (pages - free) * size


def apply_changes(database: sqlite3.Connection, changes: list[Change]) -> None:
    """All of them, or none; again is as good as once."""
    database.execute("BEGIN IMMEDIATE")
    try:
        for change, number in changes:
            if isinstance(change, Record):
                values = (number, change.kind, change.owner, change.seq, change.body)
                database.execute(INSERT, (*values, _record_digest(number, change)))
            else:
                database.execute(DELETE, change)
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _record_digest(number: int, record: Record) -> bytes:
    head = f"{number} {record.kind} {record.owner} {record.seq} ".encode()
    return hashlib.blake2b(head + record.body, digest_size=8).digest()


# ---- the mirror

SEGMENT_FOLDER = "segments"
EVERY_S, CACHES_EVERY_S, AGAIN_S = 1.0, 5.0, 10.0  # between two looks; after one that failed
GARBAGE_S = 3600.0  # between two collections, and as old must a blob be that nothing names
SETTLED_S = 2.0  # a file that changed later may still be written
REBASE_BYTES = 16 << 20  # of segments, then the journal is copied again
TRANSFERS = 8  # at a time
KEPT_MANIFESTS = 2  # the newest may be torn


class Mirror:
    """Copies of folders under an fsspec root (gs://bucket/run, or a path): what a new machine begins with.

        blobs/<sha256>             the bytes of files: two writers can only write the same
        <tree>/<epoch>-<n>.json    a manifest, written last: path -> size and sha256; the newest whole one counts

    Nothing that is torn, or half uploaded, is restored: a manifest carries its own sha256, and each file is checked. An
    epoch is one writer's time; an older writer that still runs cannot put itself before a newer one.
    """

    def __init__(self, url: str) -> None:
        self.epoch, self._number = new_id(), itertools.count()  # not the time: a clock may be set back
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # a probe that waits 60 s for a plain host
        import fsspec

        self.files, self.root = fsspec.core.url_to_fs(url, **({"auto_mkdir": True} if "://" not in url else {}))
        self._sizes: dict[str, int] | None = None  # of the blobs that are there, by sha256
        self._digests: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}  # of files that have not changed since
        self._published: dict[str, str] = {}  # tree -> its manifest's text

    def push(self, tree: str, files: Mapping[str, Path]) -> int:
        """Make these the tree; how many bytes were sent. FileNotFoundError: one has gone meanwhile, and nothing is new;
        OSError and what else the file system raises: it cannot be reached, try again.
        """
        entries = {name: self._entry(file) for name, file in sorted(files.items())}
        if self._sizes is None:
            found = self.files.find(f"{self.root}/blobs", detail=True)
            self._sizes = {name.rpartition("/")[2]: info["size"] for name, info in found.items()}
        there = self._sizes
        new = {e["sha256"]: files[name] for name, e in entries.items() if there.get(e["sha256"]) != e["bytes"]}
        with ThreadPoolExecutor(TRANSFERS) as pool:
            sent = list(pool.map(self._send, new, new.values()))
        text = _sealed({"files": entries})
        if text != self._published.get(tree):
            self.files.pipe_file(f"{self.root}/{tree}/{self.epoch}-{next(self._number):012d}.json", text.encode())
            self._published[tree] = text
            for old in self._manifests(tree)[:-KEPT_MANIFESTS]:
                self.files.rm_file(old)
        return sum(sent)

    def pull(self, tree: str, folder: Path) -> list[str]:
        """The tree's newest version in `folder`; what of it could not be had. FileNotFoundError: there is none."""
        entries = self.newest(tree)
        started = time.monotonic()
        with ThreadPoolExecutor(TRANSFERS) as pool:
            got = list(pool.map(lambda name: self._fetch(entries[name], folder / name), entries))
        total, seconds = sum(sent for sent in got if sent is not None), time.monotonic() - started
        log.info("%s: %d files, %.1f MB in %.1f s from %s", tree, len(entries), total / 1e6, seconds, self.root)
        return [name for name, sent in zip(entries, got, strict=True) if sent is None]

    def follow(self, epoch: str) -> None:
        """Be newer than that writer, whatever the clocks say."""
        self.epoch = max(self.epoch, f"{int(epoch[:16], 16) + 1:016x}{self.epoch[16:]}")

    def newest_epoch(self, tree: str) -> str:
        """Whose version it is; empty: nobody's."""
        return max((name.rpartition("/")[2].partition("-")[0] for name in self._manifests(tree)), default="")

    def newest(self, tree: str) -> dict[str, dict[str, Any]]:
        """Its files: relative path -> {"bytes", "sha256"}."""
        for name in reversed(self._manifests(tree)):
            if (entries := self._read(name)) is not None:
                return entries
        raise FileNotFoundError(f"{self.root} has no {tree}")

    def _read(self, name: str) -> dict[str, dict[str, Any]] | None:
        try:
            return _unsealed(self.files.cat_file(name))["files"]
        except ValueError as error:
            log.warning("%s is damaged (%s): an older one counts", name, error)
            return None

    def collect_garbage(self, *, older_than_s: float = 24 * 3600) -> int:
        """Remove the blobs that no manifest names, unless somebody may yet name them; how many there were."""
        manifests = [name for name in self.files.find(self.root) if name.endswith(".json")]
        held = {entry["sha256"] for name in manifests for entry in (self._read(name) or {}).values()}
        before = datetime.now(UTC) - timedelta(seconds=older_than_s)
        blobs = [name for name in self.files.find(f"{self.root}/blobs") if name.rpartition("/")[2] not in held]
        old = [name for name in blobs if self.files.modified(name) < before]
        for name in old:
            self.files.rm_file(name)
        self._sizes = None
        for file in [file for file in list(self._digests) if not file.exists()]:
            self._digests.pop(file, None)
        return len(old)

    def _manifests(self, tree: str) -> list[str]:
        self.files.invalidate_cache()
        return sorted(name for name in self.files.find(f"{self.root}/{tree}") if name.endswith(".json"))

    def _entry(self, file: Path) -> dict[str, Any]:
        stat = file.stat()
        stamp = stat.st_mtime_ns, stat.st_size
        if file not in self._digests or self._digests[file][0] != stamp:
            self._digests[file] = stamp, _found(file)
        return self._digests[file][1]

    def _send(self, digest: str, file: Path) -> int:
        self.files.put_file(str(file), f"{self.root}/blobs/{digest}")
        size = file.stat().st_size
        if self._sizes is not None:
            self._sizes[digest] = size
        return size

    def _fetch(self, entry: dict[str, Any], file: Path) -> int | None:
        """How many bytes came; None: they are not those that were sent, or are not there."""
        if file.is_file() and _found(file) == entry:
            return 0
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_name(f"{STAGED}{new_id()}")
        try:
            self.files.get_file(f"{self.root}/blobs/{entry['sha256']}", str(staged))
            if (found := _found(staged)) != entry:
                raise OSError(f"it is {found}, not {entry}")
            staged.rename(file)
            return entry["bytes"]
        except OSError as error:
            log.warning("%s cannot be restored: %s", file, error)
            staged.unlink(missing_ok=True)
            return None


class Protector:
    """Keeps a mirror of a state directory: a second behind, in threads that nobody waits for.

    The journal goes as a copy of the database and what was committed since, in the tree `state` together with all that
    it names, so that a manifest is one moment of the whole. `caches`: other trees, for folders whose files only come.
    """

    def __init__(self, mirror: Mirror, root: Path, journal: Journal, caches: Mapping[str, Path]) -> None:
        self.mirror, self.root, self.journal = mirror, root, journal
        self.segments = root / SEGMENT_FOLDER
        self.trouble, self.sent_bytes, self.protected_until = "", 0, 0.0
        self._closing, self._base, self._number = threading.Event(), False, itertools.count()
        self._epoch_file = root / "epoch"
        shutil.rmtree(self.segments, ignore_errors=True)
        self.segments.mkdir()
        repeated: list[tuple[Callable[[], object], float]] = [(self.push_state, EVERY_S)]
        repeated += [(functools.partial(self.push_cache, *cache), CACHES_EVERY_S) for cache in caches.items()]
        repeated += [(functools.partial(mirror.collect_garbage, older_than_s=GARBAGE_S), GARBAGE_S)]
        self.threads = [
            threading.Thread(target=self._repeat, args=each, name="mirror", daemon=True) for each in repeated
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def _repeat(self, push: Callable[[], object], every_s: float) -> None:
        failed = False
        while not self._closing.wait(AGAIN_S if failed else every_s):
            failed = not self._tried(push)

    def close(self, timeout_s: float) -> None:
        """The last changes too, if that takes no longer."""
        self._closing.set()
        last = threading.Thread(target=self._finish, daemon=True)
        last.start()
        last.join(timeout_s)

    def _finish(self) -> None:
        if self.threads[0].is_alive():
            self.threads[0].join()
        self._tried(self.push_state)

    def _tried(self, push: Callable[[], object]) -> bool:
        try:
            push()
        except Exception as error:  # file systems raise whatever they like; nothing here may end a training run
            said = f"{self.mirror.root} is behind: {type(error).__name__}: {error}"
            if not self.trouble:
                log.warning("%s; training goes on, unprotected", said)
            self.trouble = said
            return False
        return True

    def push_cache(self, tree: str, folder: Path) -> None:
        settled = time.time() - SETTLED_S
        files = {name: file for name, file in files_under(folder).items() if file.stat().st_mtime < settled}
        if files:
            self.sent_bytes += self.mirror.push(tree, files)

    def _check_successor(self) -> None:
        known = self._epoch_file.read_text().split() if self._epoch_file.exists() else []
        if (newest := self.mirror.newest_epoch("state")) in known and newest != self.mirror.epoch:
            self.mirror.follow(newest)
        if self.mirror.epoch not in known:  # before there is a manifest of it: a crash may come between
            self._epoch_file.write_text(" ".join([*known[-99:], self.mirror.epoch]))
        if newest not in ("", *known, self.mirror.epoch):
            remedy = "start from an empty state directory to restore it, or use another root"
            raise RuntimeError(f"another server has written there ({newest}), which this one does not go on: {remedy}")

    def push_state(self) -> None:
        started = time.time()
        self._check_successor()
        before = self._files()
        changes = self.journal.take()
        grown = sum(file.stat().st_size for file in self.segments.glob("*.seg"))
        again = changes is None or not self._base or grown > max(REBASE_BYTES, 2 * self.journal.live_bytes)
        self._base = False  # if the disk is full now
        if again:
            for old in list(self.segments.iterdir()):
                old.unlink()
            self.journal.copy(self.segments / "base.sqlite")  # it may hold some of what the next segments do, too
        elif changes:
            (self.segments / f"{next(self._number):09d}.seg").write_bytes(pack_changes(changes))
        self._base = True
        files = before | self._files()
        try:
            self.sent_bytes += self.mirror.push("state", files)
            self.protected_until, self.trouble = started, ""
        except FileNotFoundError:
            if all(file.exists() for file in files.values()):
                raise  # it is the root that is not there; else something was removed meanwhile: the next second knows

    def _files(self) -> dict[str, Path]:
        whole = {name: file for name, file in files_under(self.root / "objects").items() if not name.startswith(STAGED)}
        objects = {f"objects/{name}": file for name, file in whole.items()}
        runs = {f"runs/{name}": file for name, file in files_under(self.root / "runs").items()}
        return objects | runs | {f"{SEGMENT_FOLDER}/{name}": file for name, file in files_under(self.segments).items()}


def files_under(folder: Path) -> dict[str, Path]:
    """By relative path; not the notes of when a compiled program was last read."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.endswith("-atime")]
    return {str(file.relative_to(folder)): file for file in files}


def seal_folder(folder: Path) -> None:
    """Note what each of its files is."""
    entries = {name: _found(file) for name, file in files_under(folder).items() if file.name != SEAL}
    (folder / f"{SEAL}.tmp").write_text(_sealed({"files": entries}))
    os.replace(folder / f"{SEAL}.tmp", folder / SEAL)


def check_folder(folder: Path) -> int:
    """Remove each file that is not what `seal_folder` noted; how many there were. They are made, or fetched, again."""
    try:
        entries = _read_sealed(folder / SEAL)["files"]
    except RuntimeError:
        entries = {}
    bad = [
        file for name, file in files_under(folder).items() if file.name != SEAL and entries.get(name) != _found(file)
    ]
    for file in bad:
        file.unlink()
    return len(bad)


def restore_state(mirror: Mirror, root: Path) -> None:
    """What a lost machine had, in an empty state directory. FileNotFoundError: nobody had anything; RuntimeError: not
    enough of it is whole.
    """
    epoch, segments = mirror.newest_epoch("state"), root / SEGMENT_FOLDER
    shutil.rmtree(segments, ignore_errors=True)  # of a restore that was killed
    missing = set(mirror.pull("state", root))
    if f"{SEGMENT_FOLDER}/base.sqlite" in missing:
        raise RuntimeError(f"{mirror.root}: the journal's copy is damaged; move the root away to begin anew")
    database = sqlite3.connect(segments / "base.sqlite", isolation_level=None)
    try:
        found = {f"{SEGMENT_FOLDER}/{file.name}" for file in segments.glob("*.seg")}
        for segment in sorted(found | {name for name in missing if name.endswith(".seg")}):
            if segment in missing:
                log.warning("what came after %s is lost", segment)
                break
            apply_changes(database, unpack_changes((root / segment).read_bytes()))
    finally:
        database.close()
    (root / "epoch").write_text(epoch)
    (segments / "base.sqlite").rename(root / "journal.sqlite")  # last: until then it is restored once more
    shutil.rmtree(segments)


def pack_changes(changes: list[Change]) -> bytes:
    plain = lambda change: (
        [change.kind, change.owner, change.seq, change.body] if isinstance(change, Record) else change
    )
    return msgpack.packb([[number, plain(change)] for change, number in changes]) or b""


def unpack_changes(packed: bytes) -> list[Change]:
    return [(Record(*change) if number else tuple(change), number) for number, change in msgpack.unpackb(packed)]


# ---- files


def _write_file(file: Path, content: Content, *, digest: bool) -> dict[str, Any]:
    file.parent.mkdir(parents=True, exist_ok=True)
    content(file) if callable(content) else file.write_bytes(content)
    return _found(file) if digest else {"bytes": file.stat().st_size}


def _found(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _verify(checkpoint: Checkpoint) -> None:
    for relpath, entry in checkpoint.files.items():
        file = checkpoint.folder / relpath
        try:
            found = _found(file)
        except OSError as error:
            found = error
        if found != entry:
            raise RuntimeError(f"{file} is damaged: {found}, not {entry}; restore it, or delete {checkpoint.path}")


def _sealed(record: dict[str, Any]) -> str:
    """The record as text, with its sha256."""
    return json.dumps({"sha256": _seal(record), **record}, indent=1)


def _unsealed(text: bytes) -> dict[str, Any]:
    """The record; ValueError: it is not as it was written."""
    try:
        record = json.loads(text)
        if record.pop("sha256") == _seal(record):
            return record
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no sealed record: {error!r}") from error
    raise ValueError("its sha256 does not match")


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _read_sealed(file: Path) -> dict[str, Any]:
    try:
        return _unsealed(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{file} is damaged ({error}): restore it, or remove it to forget what it names") from error


def _read_all[T](read: Callable[[Path], T], files: Iterable[Path]) -> Iterator[T]:
    """read(file) of each; a damaged file is logged and disturbs no other."""
    for file in files:
        try:
            yield read(file)
        except RuntimeError as error:
            log.warning("skipped: %s", error)


def _fsync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_lock(file: Path) -> IO[str]:
    """The open lock file; the kernel drops the lock when the process ends, in whatever way."""
    stream = file.open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with stream:
            stream.seek(0)
            raise RuntimeError(f"{file.parent} is in use by process {stream.read()}: stop it, or use another") from None
    stream.truncate(0)
    print(os.getpid(), end="", file=stream, flush=True)
    return stream


# ---- what is there: `server.py fsck`, `cache.py status`


def inspect(root: Path) -> tuple[list[str], int]:
    """(what a state directory holds, a line each; how many parts of it are damaged). RuntimeError: it is in use."""
    if not (root / "objects").is_dir():
        raise ValueError(f"--state-dir is {root}: there is no state directory")
    lines, bad = [], 0
    with Store(root) as store:
        for file in sorted(store.manifest_files()):
            try:
                checkpoint = store.open(store.read_manifest(file).path)
                lines.append(f"{checkpoint.path}: {checkpoint.size_bytes} bytes, {checkpoint.created:%Y-%m-%d %H:%M}")
            except (ValueError, RuntimeError) as error:
                lines, bad = [*lines, f"DAMAGED: {error}"], bad + 1
        if (root / "journal.sqlite").exists():
            try:
                journal = Journal(root)
                lines += describe_records(journal.records(), journal.file.stat().st_size)
                journal.close()
            except RuntimeError as error:
                lines, bad = [*lines, f"DAMAGED: {error}"], bad + 1
    return lines, bad


def describe_records(records: list[Record], size_bytes: int) -> Iterator[str]:
    of = lambda kind: {record.owner for record in records if record.kind == kind}
    requests = [(record.owner, *record.body.decode().split()) for record in records if record.kind == "request"]
    answered, ended = of("answer"), of("end")
    live = len(of("session") - ended)
    yield f"journal: {len(records)} records, {size_bytes} bytes; {live} sessions that have not ended"
    for owner in sorted(of("run") | of("sampler")):
        mine = [(verb, request_id) for who, verb, request_id in requests if who == owner]
        waiting = [verb for verb, request_id in mine if request_id not in answered]
        state = "ended" if owner.partition(":")[0] in ended else f"{len(waiting)} waiting {sorted(set(waiting))}"
        yield f"{owner}: {len(mine)} requests, {state}"


@dataclass(frozen=True, kw_only=True)
class Command:
    action: Annotated[Literal["status", "push", "restore"], tyro.conf.Positional]  # what to do
    state_dir: Path = Path("state")  # the state directory, of a server that does not run
    mirror: str | None = None  # gs://bucket/run, or a path


def main(command: Command) -> int:
    mirror, root = Mirror(command.mirror) if command.mirror is not None else None, command.state_dir.resolve()
    if command.action == "restore" and mirror is not None:
        if (root / "journal.sqlite").exists():
            raise ValueError(f"--state-dir {root} has a state: restore into another, or move it away")
        restore_state(mirror, root)
    elif command.action == "push" and mirror is not None:
        with Store(root):
            journal = Journal(root)
            protector = Protector(mirror, root, journal, {})
            protector.push_state()
            journal.close()
            print(f"{protector.sent_bytes} bytes sent to {mirror.root}")
    elif command.action != "status":
        raise ValueError(f"--mirror is unset: {command.action} needs it")
    lines, bad = inspect(root)
    print("\n".join([f"{root}:", *lines]))
    if mirror is not None:
        entries = mirror.newest("state")
        print(f"{mirror.root}: {len(entries)} files, {sum(entry['bytes'] for entry in entries.values())} bytes")
    return min(bad, 1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sys.exit(main(tyro.cli(Command, description="What a state directory and its mirror hold.")))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"cache.py: {error}")
