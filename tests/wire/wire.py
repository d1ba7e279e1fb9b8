"""Two computers on one: network namespaces of their own, joined by a wire in user space that delays, loses and cuts.

``Wire`` is used by a test; it starts this module as a program in a namespace, which makes the other and then is the
wire: it reads IP packets from one TUN device and writes them to the other. Larger datagrams cross it in fragments, as
they do a real one.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

NEAR, FAR = "10.9.0.1", "10.9.0.2"
"""Addresses of the two computers."""
MTU = 1500
_NEW_NETWORK = 0x40000000
_TUN, _NO_PREFIX, _SET = 0x0001, 0x1000, 0x400454CA


@dataclass(frozen=True, slots=True)
class Line:
    """What the wire does to each packet, each way. ``jitter_s``: up to this is added to ``delay_s``, so packets
    overtake each other. ``port_shift``: the ports of the near computer, as the far one sees them, are so much higher;
    packets to those of before are lost (a router on the way was started again).
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    is_cut: bool = False
    port_shift: int = 0


class Wire:
    """A context: within it commands can be run on either computer."""

    def __init__(self, line: Line = Line(), seed: int = 1) -> None:
        command = [*_unshared(), sys.executable, "-m", "tests.wire.wire", str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._pids = dict(zip((NEAR, FAR), self._answer(), strict=True))
        self.set(line)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def set(self, line: Line) -> None:
        """From now on the wire is like this. What is under way arrives."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(line)), file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def command(self, at: str, words: Iterable[str]) -> list[str]:
        """What runs ``words`` on the computer with this address."""
        return ["nsenter", "-t", str(self._pids[at]), "-U", "-n", "--preserve-credentials", *words]


def why_not() -> str:
    """Why this computer can have no such wire; empty: it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}"
    try:
        command = [*_unshared(), "ip", "tuntap", "add", "dev", "near", "mode", "tun"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip()


def _unshared() -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--fork"]


# --- the program ---


def _tun(name: str, address: str) -> int:
    """A device of this process's namespace; its file."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _SET, struct.pack("16sH22x", name.encode(), _TUN | _NO_PREFIX))
    up = ("link", "set", name, "up", "mtu", str(MTU), "txqueuelen", "10000")
    for words in (("addr", "add", f"{address}/24", "dev", name), up):
        subprocess.run(["ip", *words], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.set_blocking(fd, False)
    return fd


def _other_computer() -> tuple[int, int]:
    """A process in a namespace of its own, and the file of its device. It ends with this one."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            os._exit(1)
        socket.send_fds(theirs, [b"\0"], [_tun("far", FAR)])
        theirs.recv(1)  # for good
        os._exit(0)
    theirs.close()
    _, files, _, _ = socket.recv_fds(ours, 1, 1)
    socket.socket.detach(ours)
    return pid, files[0]


def _shifted(packet: bytes, source: bool, by: int) -> bytes:
    """With the source or target port of a UDP datagram, if its header is in this fragment, moved by so much, and
    without its checksum, which IPv4 allows.
    """
    start = (packet[0] & 15) * 4
    is_first = not (packet[6] & 31 or packet[7])
    if packet[9] != socket.IPPROTO_UDP or not is_first:
        return packet
    at = start if source else start + 2
    port = int.from_bytes(packet[at : at + 2], "big") + by
    changed = bytearray(packet)
    changed[at : at + 2] = port.to_bytes(2, "big")
    changed[start + 6 : start + 8] = b"\0\0"
    return bytes(changed)


def main(seed: int) -> None:
    far_pid, far = _other_computer()
    near = _tun("near", NEAR)
    print(json.dumps([os.getpid(), far_pid]), flush=True)
    os.set_blocking(0, False)
    line, dice, order = Line(), random.Random(seed), itertools.count()
    waiting: list[tuple[float, int, int, bytes]] = []
    selector = selectors.DefaultSelector()
    for fd in (0, near, far):
        selector.register(fd, selectors.EVENT_READ)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for found, _ in selector.select(wait_s):
            fd = found.fd
            if fd == 0:
                words = os.read(0, 65_536)
                if not words:
                    return
                line = Line(**json.loads(words))
                print("true", flush=True)
                continue
            for _ in range(64):
                try:
                    packet = os.read(fd, 65_536)
                except BlockingIOError:
                    break
                if packet[0] >> 4 != 4 or line.is_cut or dice.random() < line.loss:
                    continue
                if line.port_shift:
                    packet = _shifted(packet, fd == near, line.port_shift if fd == near else -line.port_shift)
                for _ in range(1 + (dice.random() < line.duplicate)):
                    due_s = time.monotonic() + line.delay_s + dice.random() * line.jitter_s
                    heapq.heappush(waiting, (due_s, next(order), far if fd == near else near, packet))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, _, fd, packet = heapq.heappop(waiting)
            try:
                os.write(fd, packet)
            except OSError:  # its queue is full: lost
                continue


if __name__ == "__main__":
    main(int(sys.argv[1]))
