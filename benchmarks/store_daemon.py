"""The store daemon over memory beside redis-server: `python benchmarks/store_daemon.py [--json FILE] [--quick]`.

`skymemory store serve memory://` and `redis-server` run at the same time and are asked in turns, by the same client:
`redis-py` with `hiredis`, over a Unix socket and over TCP on loopback; one client process, and eight at once. Each
client has a value of its own, which it writes and reads again and again.

Every turn begins with a run that is not timed, so that what is received into has been touched; freed memory stays warm
in the clients (`_bench.WARM_MALLOC`). A rate is all clients' bytes by the time from the first one's beginning to the
last one's end. A ratio is our rate by Redis's of the same round, median (least to most) over the rounds. Above 1 we are
faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from _bench import Verb, client_process, print_table, redis_server, turn, write_json

SIZES = (4 << 10, 64 << 10, 512 << 10, 2_949_248, 16 << 20)
CLIENTS = (1, 8)
GOALS = {"read": 1.0, "write": 0.9}
"""At 2.9 MB, on a quiet machine."""
GOAL_BYTES = 2_949_248
LEAST_RUNS, MOST_RUNS = 4, 1000


def verbs(address: str, name: str, size_bytes: int) -> tuple[Verb, Verb]:
    """Read and write of one value, at ``address``; ``SystemExit`` where one of them fails."""
    import redis

    client = redis.Redis.from_url(address, socket_read_size=256 << 10)
    value = os.urandom(size_bytes)

    def write() -> None:
        if not client.set(name, value):
            raise SystemExit(f"{address} did not store the value")

    def read() -> None:
        found = client.get(name)
        if found is None or len(found) != size_bytes:
            raise SystemExit(f"{address} did not give the value back")

    write()
    if client.get(name) != value:
        raise SystemExit(f"{address} gave another value back")
    return read, write


@contextmanager
def daemon(folder: Path) -> Iterator[dict[str, str]]:
    """The addresses of a store daemon over memory, by the kind of socket."""
    command = [sys.executable, "-m", "skymemory", "store", "serve", "memory://2GiB"]
    command += ["--listen", f"unix://{folder}/sky.sock", "--listen", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            where = [process.stdout.readline().split(" at ")[1].split()[0] for _ in range(2)]
            yield {"Unix socket": where[0], "TCP": where[1].replace("tcp://", "redis://")}
        finally:
            process.terminate()


def compare(
    addresses: dict[str, str], size_bytes: int, clients: int, rounds: int, turn_bytes: int
) -> Iterator[dict[str, object]]:
    """A row for reads and one for writes: rates in MB/s and their ratio."""
    runs = max(LEAST_RUNS, min(MOST_RUNS, turn_bytes // (size_bytes * clients)))
    rates: dict[tuple[str, str], list[float]] = {(who, verb): [] for who in addresses for verb in GOALS}
    with ExitStack() as stack:
        pipes = {
            who: [stack.enter_context(client_process(verbs, address, f"v{at}", size_bytes)) for at in range(clients)]
            for who, address in addresses.items()
        }
        for number in range(rounds):
            order = list(addresses) if number % 2 else list(addresses)[::-1]
            for verb in GOALS:
                for who in order:
                    rate = clients * runs * size_bytes / turn(pipes[who], verb, runs) / 1e6
                    rates[who, verb].append(rate)
    for verb, goal in GOALS.items():
        ours, theirs = rates["daemon", verb], rates.get(("Redis", verb), [])
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True)) if theirs else []
        yield {
            "size_bytes": size_bytes,
            "clients": clients,
            "verb": verb,
            "daemon_mb_per_s": statistics.median(ours),
            "redis_mb_per_s": statistics.median(theirs) if theirs else None,
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_least": ratios[0] if ratios else None,
            "ratio_most": ratios[-1] if ratios else None,
            "goal": goal if size_bytes == GOAL_BYTES else None,
            "rounds": rounds,
            "runs": runs,
        }


def shown(row: dict[str, object]) -> list[str]:
    def number(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    ratio = f"{row['ratio']:.2f} ({row['ratio_least']:.2f}–{row['ratio_most']:.2f})" if row["ratio"] else ""
    size = f"{row['size_bytes'] / 1000:,.0f} KB"  # type: ignore[operator]
    rates = [number("daemon_mb_per_s", ",.0f"), number("redis_mb_per_s", ",.0f")]
    return [str(row["over"]), size, str(row["clients"]), str(row["verb"]), *rates, ratio, number("goal", ".1f")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="BYTES")
    parser.add_argument("--clients", type=int, nargs="*", default=CLIENTS, metavar="N")
    parser.add_argument("--quick", action="store_true", help="three short rounds, Unix socket only")
    args = parser.parse_args()
    rounds, turn_bytes = (3, 64 << 20) if args.quick else (args.rounds, 256 << 20)
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = stack.enter_context(daemon(folder))
        port = stack.enter_context(redis_server(folder / "redis.sock"))
        theirs = {"Unix socket": f"unix://{folder}/redis.sock", "TCP": f"redis://127.0.0.1:{port}"}
        for over in ("Unix socket",) if args.quick else tuple(ours):
            addresses = {"daemon": ours[over]} | ({} if port is None else {"Redis": theirs[over]})
            for clients in args.clients:
                for size_bytes in args.sizes:
                    for row in compare(addresses, size_bytes, clients, rounds, turn_bytes):
                        rows.append({"over": over, **row})
                        print("  ".join(shown(rows[-1])), file=sys.stderr)
    header = ["over", "value", "clients", "verb", "daemon MB/s", "Redis MB/s", "ratio (least–most)", "goal"]
    print_table("Store daemon over memory, beside redis-server", header, [shown(row) for row in rows])
    write_json(args.json, "store_daemon", 0, rows)


if __name__ == "__main__":
    main()
