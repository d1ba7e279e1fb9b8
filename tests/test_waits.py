"""No wait on another process without a deadline: every call that may be one is found, and has a reason or a timeout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src/skymemory", ROOT / "lab/src/skymemory_lab")

KILLED = "it was killed before: the kernel ends it"
ENDED = "it has ended, or answered, before: this only takes what is there"
LIFE = "to wait for it, or for its clients, is all that this program does"
TIMED = "its socket, or the block around it, has a timeout"
NEVER_BLOCKS = "its socket does not block, or it is UDP or ZeroMQ, which connects later"
FILE = "a regular file"

WAITS = {
    "cli/cluster.py _end_started supervisor.wait": KILLED,
    "cli/cluster.py _supervise.follow sys.stdin.buffer.readline": LIFE,
    "cli/doctor.py _report file.readline": FILE,
    "cluster/supervisor.py Supervised.run process.wait": ENDED,
    "cluster/supervisor.py Supervised.run self._guard.communicate": KILLED,
    "cluster/supervisor.py _end process.wait": KILLED,
    "cluster/supervisor.py is_healthy client.connect": TIMED,
    "demo/engines.py _process guarded.communicate": KILLED,
    "demo/engines.py _process process.communicate": KILLED,
    "demo/motion.py _kill child.process.wait": KILLED,
    "demo/processes.py _addresses process.stdout.readline": TIMED,
    "demo/processes.py _end process.wait": KILLED,
    "demo/vllm.py run_vllm server.wait": TIMED,
    "engine/run.py _wait_for os.wait": LIFE,
    "router/engines/follower.py Follower.__init__ self._socket.connect": NEVER_BLOCKS,
    "router/engines/follower.py replay socket.connect": NEVER_BLOCKS,
    "router/peer_frames.py FrameCodec.read reader.readexactly": "its caller has a timeout, or cancels it",
    "router/peer_frames.py read_greeting reader.readexactly": TIMED,
    "router/peers.py _Link._run asyncio.open_connection": TIMED,
    "router/http/listener.py Listener._accept listening.accept": NEVER_BLOCKS,
    "router/http/listener.py Listener.stop_accepting listening.accept": NEVER_BLOCKS,
    "router/http/upstream.py Pool._open_connection loop.create_connection": TIMED,
    "sim/sweeps.py _on_ray ray.get": ENDED,
    "sim/sweeps.py _on_ray ray.wait": LIFE,
    "sim/sweeps.py sweep ProcessPoolExecutor": LIFE,
    "store/host/client.py HostStore._ask self._sock.recv": TIMED,
    "store/host/client.py HostStore._ask_one_below sock.recv": TIMED,
    "store/host/client.py HostStore._attach sock.connect": TIMED,
    "store/host/client.py HostStore._connect_below sock.connect": TIMED,
    "store/host/client.py HostStore._connect_below sock.recv": TIMED,
    "store/host/client.py HostStore._attach sock.recv": TIMED,
    "store/host/server.py ArenaServer._accept self._listener.accept": NEVER_BLOCKS,
    "store/host/server.py ArenaServer._receive connection.sock.recv": NEVER_BLOCKS,
    "store/host/server.py ArenaServer._run self._woken.recv": ENDED,
    "store/host/server.py ArenaServer._serve_below sock.recv": LIFE,
    "store/redis.py _DeadlineSocket.recv self._sock.recv": TIMED,
    "store/redis.py _DeadlineSocket.recv_into self._sock.recv_into": TIMED,
    "store/redis_server/daemon.py Conversation._end_with self._sock.recv": TIMED,
    "store/redis_server/daemon.py Conversation._read self._sock.recv": TIMED,
    "store/redis_server/daemon.py Conversation._read_ahead self._sock.recv": TIMED,
    "store/redis_server/daemon.py Daemon._accept listener.accept": ENDED,
    "store/redis_server/daemon.py Daemon.serve selector.select": LIFE,
    "store/redis_server/daemon.py Daemon.serve self._woken.recv": ENDED,
    "store/redis_server/daemon.py _remove_stale probe.connect": NEVER_BLOCKS,
    "store/redis_server/daemon.py receive_all sock.recv_into": TIMED,
    "testbed/host_process.py _Line._received self._socket.recv": NEVER_BLOCKS,
    "testbed/supervisor.py Child.release self.line.sendall": "a few bytes fit into an empty socket pair",
    "testbed/supervisor.py _await_ready child.line.recv": ENDED,
    "testbed/supervisor.py end_children child.process.wait": KILLED,
    "transport/udp_client.py UdpClient._sleep self._woken.recv": NEVER_BLOCKS,
    "transport/udp_socket.py largest_whole_bytes sock.connect": NEVER_BLOCKS,
    "transport/udp_socket.py source_towards sock.connect": NEVER_BLOCKS,
}
"""File, function and call of each wait without a timeout of its own, and why it ends. Threads and tasks of the same
process (queues, events, futures, locks in memory) stop and go on together with who waits: they are not listed.
"""

_TIMEOUTS = {"timeout", "timeout_s"}
_RUNS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
_RECEIVES = {"recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "accept", "sendall", "sendfile"}
_READS = {"readline", "readexactly", "readuntil"}
_CONNECTS = {
    "create_connection",
    "open_connection",
    "urlopen",
    "HTTPConnection",
    "HTTPSConnection",
    "create_unix_connection",
}
_OF_CHILDREN = {"os.wait", "os.waitpid", "os.waitid", "os.wait3", "os.wait4"}
_POOLS = {"ProcessPoolExecutor", "multiprocessing.Pool"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def may_wait(call: ast.Call, name: str, has_children: bool) -> bool:
    """Whether a call may wait on another process, and has no deadline of its own."""
    last = name.rpartition(".")[2]
    timed = bool(_TIMEOUTS.intersection(keyword.arg or "" for keyword in call.keywords))
    if last in ("flock", "lockf"):
        how = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
        return "LOCK_NB" not in how and "LOCK_UN" not in how
    if name in _OF_CHILDREN:
        return "WNOHANG" not in ast.unparse(call)
    if name in _RUNS or last in _CONNECTS or name in ("ray.get", "ray.wait"):
        return not timed
    if last in ("wait", "communicate"):
        return has_children and isinstance(call.func, ast.Attribute) and not call.args and not timed
    if last == "select":
        return "." in name and not timed and (not call.args or (name == "select.select" and len(call.args) < 4))
    if last == "connect":
        return "sock" in name.lower() or "probe" in name or "client" in name
    return name in _POOLS or ("." in name and last in _RECEIVES | _READS)


def find_waits(source: str) -> list[tuple[str, int]]:
    """The function and call of each, as in ``WAITS``, and its line."""
    tree = ast.parse(source)
    has_children = "subprocess" in source or "Popen" in source or ".process" in source

    found: list[tuple[str, int]] = []

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call) and _is_limited(node.value):
            return
        if isinstance(node, ast.Call) and not _is_limited(node):
            name = _dotted(node.func)
            if may_wait(node, name, has_children):
                found.append((f"{'.'.join(scope)} {name}", node.lineno))
        elif isinstance(node, ast.Call):
            return
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(tree, ())
    return found


def _is_limited(call: ast.Call) -> bool:
    return _dotted(call.func) == "asyncio.wait_for" and len(call.args) + len(call.keywords) > 1


def test_every_wait_on_another_process_has_a_deadline_or_a_reason() -> None:
    found: dict[str, str] = {}
    files = [(path, path.relative_to(source).as_posix()) for source in SOURCES for path in sorted(source.rglob("*.py"))]
    for path, file in files:
        for where, line in find_waits(path.read_text("utf-8")):
            found[f"{file} {where}"] = f"{file}:{line}"
    new = {wait: at for wait, at in found.items() if wait not in WAITS}
    assert not new, f"give these a timeout, or WAITS a reason: {new}"
    assert not WAITS.keys() - found.keys(), "these are no more"


@pytest.mark.parametrize(
    "wait",
    [
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "fcntl.flock(fd, fcntl.LOCK_SH)",
        "fcntl.lockf(fd, fcntl.LOCK_EX)",
        "subprocess.run(['true'])",
        "subprocess.check_output(['true'])",
        "subprocess.Popen(['true']).wait()",
        "subprocess; child.communicate()",
        "subprocess; await child.wait()",
        "os.waitpid(pid, 0)",
        "os.wait()",
        "sock.recv(10)",
        "self._socket.sendall(data)",
        "listener.accept()",
        "socket.create_connection(address)",
        "urllib.request.urlopen(url)",
        "http.client.HTTPConnection(host)",
        "probe.connect(path)",
        "selector.select()",
        "select.select(a, b, c)",
        "await reader.readexactly(4)",
        "ray.get(answer)",
        "ProcessPoolExecutor(4)",
    ],
)
def test_a_wait_without_a_deadline_is_found(wait: str) -> None:
    assert list(find_waits(f"async def f():\n    {wait}\n"))


@pytest.mark.parametrize(
    "wait",
    [
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(fd, fcntl.LOCK_UN)",
        "subprocess.run(['true'], timeout=5)",
        "subprocess; child.wait(5.0)",
        "subprocess; await asyncio.wait_for(child.wait(), 5.0)",
        "os.waitpid(pid, os.WNOHANG)",
        "socket.create_connection(address, timeout=5)",
        "selector.select(1.0)",
        "event.wait()",
        "queue.get()",
    ],
)
def test_a_wait_with_a_deadline_is_none(wait: str) -> None:
    assert not list(find_waits(f"async def f():\n    {wait}\n"))
