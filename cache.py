"""The checkpoint store: every kept version of an adapter, in a folder that a crash at any moment leaves whole.

    optim_step -> save_weights, save_weights_for_sampler -> CACHE -> load_weights, the sampler

Under the state directory, which one process at a time may hold:

    objects/<id>/...                   the files of one checkpoint, immutable; <id> is a time and a random number
    runs/<run>/run.json                what a training run is (<run> is the run id with '-' for ':')
    runs/<run>/<segment>/<name>.json   the manifest of tinker://<run id>/<segment>/<name>

Invariants:
  1. A checkpoint exists from the rename of its manifest, once its files are on the disk, until the unlinking of its
     manifest, before they go. An object that no manifest names is garbage, removed when the store is opened.
  2. No folder is ever used twice: engines key their prefix caches by path.
  3. A wrong byte is never served: files and manifests carry a sha256; a mismatch is a RuntimeError that names the file.
  4. No client text becomes a path unchecked: a TinkerPath with an unsafe part cannot be made.

Left out: mirrors (one has only to copy in the same order: the object, then its manifest), and counting readers: read a
checkpoint as soon as it is opened; once another thread overwrites or deletes it, its files vanish.

Run:        pytest tests/test_cache.py
Read first: Store.write, which is the whole idea.
"""

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Buffer, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

SEGMENTS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}  # -> checkpoint_type
SNAPSHOTS = "snapshots"  # the segment of ephemeral sampler snapshots: clients cannot name it, no manifest lies there
MAX_TTL_SECONDS = 10 * 365 * 24 * 3600
Content = Buffer | Callable[[Path], object]  # of a file: bytes, a contiguous array, or what writes it
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
        self._remove_garbage()

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
                return self._read_manifest(self._manifest_file(path))

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
            for file in self._manifest_files(segment=SNAPSHOTS):
                if file.stem not in names:
                    file.unlink()
            self._remove_garbage()

    def _occupant(self, path: TinkerPath, overwrite: bool) -> Checkpoint | None:
        with self._mutex:
            old = self._find(path)
        if old is not None and not overwrite:
            raise ValueError(f"checkpoint {path} exists: choose another name or overwrite=True")
        return old

    @contextmanager
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

    def find(self, path: TinkerPath) -> Checkpoint | None:
        """As it says that it is, its bytes unchecked; None: there is none."""
        return self._find(path)

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
        checkpoint = self._find(path)
        if checkpoint is None:
            known = [str(other.path) for other in self.list(path.run_id)]
            newest = ", ".join(known[:5]) or "none; save one first"
            raise ValueError(f"unknown checkpoint {path}: its run has {len(known)}, newest first: {newest}")
        return checkpoint

    def _find(self, path: TinkerPath) -> Checkpoint | None:
        """The checkpoint under `path`; an expired one is removed and does not count."""
        file = self._manifest_file(path)
        checkpoint = self._read_manifest(file) if file.exists() else None
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

    def _remove_garbage(self) -> None:
        try:
            named = {self._read_manifest(file).folder.name for file in self._manifest_files()}
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

    def _manifest_files(self, run_id: str | None = None, segment: str = "*") -> Iterator[Path]:
        return self._runs.glob(f"{'*' if run_id is None else self._run_file(run_id).parent.name}/{segment}/*.json")

    def _put_manifest(self, checkpoint: Checkpoint, *, sync: bool = True) -> None:
        record = {**vars(checkpoint), "path": str(checkpoint.path), "folder": checkpoint.folder.name}
        for key in ("created", "expires_at"):
            record[key] = record[key] and record[key].isoformat()
        self._put_sealed(self._manifest_file(checkpoint.path), record, sync=sync)

    def _read_manifest(self, file: Path) -> Checkpoint:
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
        staged.write_text(json.dumps({"sha256": _seal(record), **record}, indent=1))
        if sync:
            _fsync(staged)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, file)
        for folder in (file.parent, file.parent.parent, self._runs) if sync else ():  # each may have a new name in it
            _fsync(folder)

    def _readable(self, run_id: str | None = None) -> Iterator[Checkpoint]:
        return _read_all(self._read_manifest, self._manifest_files(run_id))

    def list(self, run_id: str | None = None) -> list[Checkpoint]:  # stays last: `list[...]` below it would mean itself
        """The checkpoints of one run, or of all, newest first; a damaged one is logged and left out."""
        with self._mutex:
            live = [each for each in self._readable(run_id) if not each.expired and each.path.segment in SEGMENTS]
        return sorted(live, key=lambda checkpoint: checkpoint.created, reverse=True)


# ---- the journal


@dataclass(frozen=True, slots=True)
class Record:
    kind: str
    owner: str
    seq: int
    body: bytes


class Journal:
    """What the server has promised, and what came of it: records, in the order in which they were added.

    `add` and `drop` only note a change: a thread of its own commits all that are noted, and `durable` waits for that.
    When it cannot write, `trouble` says why; it tries again, and what is there is always whole up to some moment.
    """

    def __init__(self, root: Path, *, most_bytes: int = 8 << 30) -> None:
        self.file, self.most_bytes, self.live_bytes = root / "journal.sqlite", most_bytes, 0
        self.trouble = ""
        self._mutex, self._noted = threading.Lock(), threading.Event()
        self._changes: list[tuple[Record | tuple[str, str, int, int], int]] = []  # noted, not yet committed
        self._batch: Future = Future()  # done when they are
        self._committing: Future | None = None
        self._closing = False
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
        except (sqlite3.Error, OverflowError) as error:
            raise self._damaged(error) from error
        return records

    def add(self, kind: str, owner: str, seq: int = 0, body: bytes = b"") -> None:
        with self._mutex:
            self._note(Record(kind, owner, seq, body), next(self._ids))

    def drop(self, kind: str, owner: str, *, seq: int | None = None, below: int = 2**63 - 1) -> None:
        """Forget the owner's records of this kind: the one numbered `seq`, or all that are numbered lower."""
        with self._mutex:
            self._note((owner, kind, *((0, below) if seq is None else (seq, seq + 1))), 0)

    def _note(self, *change: Any) -> None:
        self._changes.append(change)
        self._noted.set()

    def durable(self) -> Future:
        """Done when all that was noted before has been committed, or could not be."""
        with self._mutex:
            return self._batch if self._changes else self._committing if self._committing else NOTHING_TO_DO

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
            with self._mutex:
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

    def _commit(self, changes: list[tuple[Record | tuple[str, str, int, int], int]]) -> None:
        if not changes:
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for change, number in changes:
                if isinstance(change, Record):
                    values = (number, change.kind, change.owner, change.seq, change.body)
                    self._database.execute(INSERT, (*values, _record_digest(number, change)))
                else:
                    self._database.execute(DELETE, change)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        pages, free, size = (self._database.execute(f"PRAGMA {what}").fetchone()[0] for what in SIZES)
        self.live_bytes = (pages - free) * size


SCHEMA = """
CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY, kind TEXT, owner TEXT, seq INTEGER, body BLOB, digest BLOB);
CREATE INDEX IF NOT EXISTS by_owner ON records (owner, kind, seq);
"""
INSERT = "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)"
DELETE = "DELETE FROM records WHERE owner = ? AND kind = ? AND seq >= ? AND seq < ?"
SIZES = ("page_count", "freelist_count", "page_size")
HELD_BYTES = 256 << 20  # of records that cannot be written, in memory: then no more is written at all
NOTHING_TO_DO: Future = Future()
NOTHING_TO_DO.set_result(None)


def _record_digest(number: int, record: Record) -> bytes:
    head = f"{number} {record.kind} {record.owner} {record.seq} ".encode()
    return hashlib.blake2b(head + record.body, digest_size=8).digest()


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


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _read_sealed(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_bytes())
        if record.pop("sha256") != _seal(record):
            raise ValueError("its sha256 does not match")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{file} is damaged ({error}): restore it, or remove it to forget what it names") from error
    return record


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
