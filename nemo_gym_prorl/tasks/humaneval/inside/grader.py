# SPDX-License-Identifier: Apache-2.0
"""Runs a problem's tests against a candidate, in a sandbox that the agent never touched.

Two processes. The *tester* executes only what the data set brings: reference and tests. The *candidate*
process executes the submitted source. They exchange plain data over two pipes: the candidate's objects, with whatever
``__eq__`` they define, never reach the tester, which rebuilds built-in values from JSON. Nothing is pickled or
marshalled. The candidate gets copies of the arguments, so it cannot change what the tests hold.

The candidate's process is forked before the tester has read its job, so nothing of the job was ever in its memory, and
it waits. The tester first does everything that could be turned against it: it makes itself undumpable, reads the job
(the tests and the nonce are then only in its memory), imports whatever the tests import, and shuts the import system,
so that a changed standard library is never loaded. Only then it hands over the source. The candidate runs without
capabilities, under resource limits, behind a filter of system calls (no signals: a tester that is stopped holds its
place for as long as it may take), in a session of its own. Two lines start with the nonce: that the candidate's source
is about to be run, and the verdict.

Called as ``python3 -I -c PROGRAM`` (:mod:`nemo_gym_prorl.tasks.program`) with the job as JSON on standard input. What
it imports is paid for with each rollout, hence as little as will do.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn  # most solutions import it: here once for both processes

from nemo_gym_prorl.tasks.inside import walls
from nemo_gym_prorl.tasks.inside.privileges import drop_privileges, hide


MAX_FRAME_BYTES = 16 << 20
MAX_INT_DIGITS = 4000
DETAIL_CHARS = 500
MAX_FILES = 4096
"""None of ours has a higher number."""


class TimeUp(BaseException):
    """The budget is used up; a BaseException, so that no test swallows it."""


class CandidateGone(BaseException):
    """The candidate process ended or broke the protocol; a BaseException for the same reason."""


class CandidateRaised(Exception):
    """The candidate's function raised."""


# --- plain data over a pipe ---


def encode(value: Any) -> Any:
    """Built-in values as JSON that tells lists from tuples and sets; other iterables become one-shot iterators."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 1 << 62 else ["int", hex(number)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    for name, kinds in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kinds):
            return [name, [encode(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    if hasattr(value, "__iter__"):
        return ["iterator", [encode(item) for item in value]]
    raise TypeError(f"a value of type {type(value).__name__} cannot leave the candidate's process")


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`: always built-in values.

    Raises:
        CandidateGone: the value is not one that :func:`encode` makes.
    """
    if not isinstance(value, list):
        return value
    try:
        name, payload = value[0], value[1]
        if name == "dict":
            return {decode(key): decode(item) for key, item in payload}
        if name == "int":
            return int(payload, 16)
        if name == "bytes":
            return bytes.fromhex(payload)
        if name == "complex":
            return complex(payload, value[2])
        if name == "range":
            return range(payload, value[2], value[3])
        maker: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[name]
        return maker([decode(item) for item in payload])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CandidateGone(f"the candidate broke the protocol: {error!r}") from None


def frame(message: Any) -> bytes:
    """A message as it goes over a pipe.

    Raises:
        ValueError: it is too large.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a value of {len(data)} bytes is too large")
    return struct.pack(">I", len(data)) + data


def send(stream: Any, message: Any) -> None:
    """Write one frame."""
    stream.write(frame(message))
    stream.flush()


def receive(stream: Any) -> Any:
    """Read one frame.

    Raises:
        CandidateGone: the other side closed the pipe or sent something else.
    """
    header = stream.read(4)
    size = struct.unpack(">I", header)[0] if len(header) == 4 else 0
    if not header:
        raise CandidateGone("the candidate's process ended")
    if not 0 < size <= MAX_FRAME_BYTES:
        raise CandidateGone("the candidate broke the protocol")
    data = stream.read(size)
    if len(data) < size:
        raise CandidateGone("the candidate's process ended")
    try:
        return json.loads(data.decode("ascii"), parse_int=bounded_int)
    except (ValueError, RecursionError):
        raise CandidateGone("the candidate broke the protocol") from None


def bounded_int(digits: str) -> int:
    """Read an integer, but not one whose reading alone would take the tester's time."""
    if len(digits) > MAX_INT_DIGITS:
        raise ValueError("too many digits")
    return int(digits)


# --- the candidate's process ---


def limit_resources(limits: dict[str, int]) -> None:
    """Apply the job's limits to this process and its children."""
    memory = limits["memory_mib"] << 20
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_mib"] << 20),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        walls.limit(name, value)


def candidate_main(requests: Any, answers: Any) -> None:
    """Load the source, then answer calls until the tester closes the pipe."""
    job = receive(requests)
    limit_resources(job["limits"])
    drop_privileges()
    walls.filter_calls(walls.strict(os.uname().machine))
    os.chdir(job["folder"])
    try:
        code = compile(job["source"], "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        send(answers, ["refused", "syntax_error", f"{type(error).__name__}: {error}"])
        return
    namespace: dict[str, Any] = {"__name__": "solution", "__file__": "solution.py"}
    try:
        exec(code, namespace)
    except BaseException as error:  # SystemExit too
        send(answers, ["refused", "crashed", f"on import: {type(error).__name__}: {error}"])
        return
    function = namespace.get(job["entry_point"])
    if not callable(function):
        send(answers, ["refused", "no_solution", f"solution.py defines no function {job['entry_point']}"])
        return
    send(answers, ["ready"])
    while True:
        try:
            arguments, keywords = decode(receive(requests))
        except CandidateGone:
            return
        try:
            answer = frame(["returned", encode(function(*arguments, **keywords))])
        except BaseException as error:
            answer = frame(["raised", f"{type(error).__name__}: {str(error)[:DETAIL_CHARS]}"])
        answers.write(answer)
        answers.flush()


def be_the_candidate(requests: int, answers: int) -> NoReturn:
    """Have nothing open but the two pipes; there is no way back into the tester's program."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        low, high = sorted((requests, answers))
        for first, last in ((3, low), (low + 1, high), (high + 1, MAX_FILES)):
            os.closerange(first, last)
        candidate_main(os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))
    finally:
        os._exit(0)


# --- the tester ---


class Candidate:
    """The submitted function, as the tests see it: a call goes to the other process and back."""

    def __init__(self) -> None:
        from_tester, requests = os.pipe()
        answers, to_tester = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            be_the_candidate(from_tester, to_tester)
        os.close(from_tester)
        os.close(to_tester)
        self._requests = os.fdopen(requests, "wb")
        self._answers = os.fdopen(answers, "rb")

    def ask(self, message: Any) -> None:
        """Send a frame."""
        try:
            send(self._requests, message)
        except BrokenPipeError:
            raise CandidateGone("the candidate's process ended") from None

    def answer(self) -> Any:
        """Receive a frame."""
        return receive(self._answers)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.ask(encode((arguments, keywords)))
        answer = self.answer()
        if not isinstance(answer, list) or len(answer) != 2 or answer[0] not in ("returned", "raised"):
            raise CandidateGone("the candidate broke the protocol")
        if answer[0] == "raised":
            raise CandidateRaised(str(answer[1]))
        return decode(answer[1])

    def kill(self) -> None:
        """End the process and whatever stayed in its session."""
        os.kill(self._process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it had no time to begin a session
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def import_ahead(*sources: str) -> None:
    """Import every module that the sources mention, however deep, then shut the import system."""
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                __import__(name)


def where(error: BaseException, test: str) -> str:
    """The line of the tests at which it went wrong."""
    number, at = 0, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<tests>":
            number = at.tb_lineno
        at = at.tb_next
    lines = test.splitlines()
    if not 0 < number <= len(lines):
        return ""
    return f" at line {number} of the tests: {lines[number - 1].strip()[:200]}"


def examine(job: dict[str, Any], candidate: Candidate) -> tuple[str, str]:
    """Run the tests; return reason and detail."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["reference"], "<reference>", "exec"), namespace)
    # A test that calls the function by its name gets the reference; only the argument of check() is the candidate.
    exec(compile(job["test"], "<tests>", "exec"), namespace)
    try:
        candidate.ask({key: job[key] for key in ("source", "entry_point", "limits", "folder")})
        first = candidate.answer()
        if first != ["ready"]:
            known = isinstance(first, list) and len(first) == 3 and first[0] == "refused"
            if known and first[1] in ("syntax_error", "crashed", "no_solution"):
                return str(first[1]), str(first[2])
            raise CandidateGone("the candidate broke the protocol")
        namespace["check"](candidate)
    except CandidateGone as error:
        return "crashed", str(error) + where(error, job["test"])
    except TimeUp as error:
        return "timed_out", f"after {job['timeout_s']:g} s{where(error, job['test'])}"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:200]}{where(error, job['test'])}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        candidate.kill()
    return "passed", ""


def time_up(signum: int, frame: Any) -> None:
    """The alarm."""
    raise TimeUp


def tell(nonce: str, what: Any) -> None:
    """One line for who asked for a verdict."""
    os.write(1, f"\n{nonce} {json.dumps(what)}\n".encode())


def main() -> None:
    """Fork the candidate, read the job, run it, print the verdict."""
    candidate = Candidate()
    hide()
    job = json.loads(sys.stdin.read())
    import_ahead(job["reference"], job["test"])
    sys.meta_path.clear()
    job["folder"] = f"/tmp/candidate-{os.urandom(8).hex()}"
    os.mkdir(job["folder"], 0o700)  # noqa: PTH102 - pathlib costs much
    # From here on it may be the candidate's doing if there is no verdict.
    tell(job["nonce"], "begun")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the rest of the process
    signal.signal(signal.SIGALRM, time_up)
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
    try:
        reason, detail = examine(job, candidate)
    except TimeUp:
        reason, detail = "timed_out", ""
    tell(job["nonce"], {"reason": reason, "detail": detail[:DETAIL_CHARS]})


if __name__ == "__main__":
    main()
