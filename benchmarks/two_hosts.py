"""Dispatch and combine between two hosts on a 1 Gbit/s link, made of two network namespaces.

    sudo .venv/bin/python benchmarks/two_hosts.py [--gbit 1] [--tokens 4096] [--json FILE]

Namespaces A and B are joined by a veth pair; both ends send through a token bucket (tc tbf) of the
link's rate.  One rank runs in each, on its share of the cores, over torch.distributed's gloo;
`two_hosts_rank.py` is what they do.  Namespaces carry this process's id in their names and are
taken down whatever happens; those of a run that was killed are taken down by the next one.

Exit code: 0; 1 if a row was wrong or a rank failed; 2 without root or iproute2, or for a wrong
argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from one_gpu import SetupError

RANK_SCRIPT = Path(__file__).with_name("two_hosts_rank.py")
PREFIX = "fp4comm"  # of the namespaces: fp4comm-PID-rank
INTERFACE = "link0"
NETWORK, ADDRESSES = "10.99.4.0/24", ("10.99.4.1", "10.99.4.2")
MASTER_PORT = 29555
QUEUE_MS = 250  # what the bucket lets wait before it drops: more than three peers send at once
LAST_WORDS_S = 10.0  # for a rank to fail by itself once its peer has


@dataclasses.dataclass(frozen=True)
class Link:
    """Shape of the link, the same at both ends.

    Attributes:
        gbit: rate in 10^9 bit/s, Ethernet headers included.
        burst_kib: what may pass at once after a pause.
        mtu: of the interface.
        congestion: TCP's congestion control at both ends; None leaves the machine's own.
    """

    gbit: float
    burst_kib: int
    mtu: int
    congestion: str | None

    @property
    def qdisc(self) -> str:
        """The queueing discipline as tc takes it."""
        rate = round(self.gbit * 1e9)
        return f"tbf rate {rate}bit burst {self.burst_kib}kb latency {QUEUE_MS}ms"


def run(command: str) -> str:
    """Run a command of iproute2; what it says when it fails is the error."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def check_usable() -> None:
    """Refuse without root or iproute2."""
    if os.geteuid() != 0:
        raise SetupError("two network namespaces need root; run this under sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise SetupError(f"{program}: not found; install iproute2")


# The link


@contextlib.contextmanager
def two_namespaces(link: Link) -> Iterator[list[str]]:
    """Make the link and take it down again, processes in it included."""
    remove_leftovers()
    names = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for name in names:
            run(f"ip netns add {name}")
        first, second = names
        run(f"ip -n {first} link add {INTERFACE} type veth peer {INTERFACE} netns {second}")
        for name, address in zip(names, ADDRESSES, strict=True):
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
            run(f"ip -n {name} link set {INTERFACE} mtu {link.mtu} up")
            if link.congestion is not None:  # by the route: a namespace may not choose every one
                run(
                    f"ip -n {name} route change {NETWORK} dev {INTERFACE} congctl {link.congestion}"
                )
            run(f"tc -n {name} qdisc add dev {INTERFACE} root {link.qdisc}")
        yield names
    finally:
        for name in names:
            remove(name)


def remove_leftovers() -> None:
    """Take down the namespaces of runs that are gone."""
    for line in run("ip netns list").splitlines():
        name = re.match(rf"{PREFIX}-(\d+)-\w+", line)
        if name is not None and not Path(f"/proc/{name[1]}").exists():
            remove(name[0])


def remove(name: str) -> None:
    """End what runs in a namespace and delete it; there may be none."""
    with contextlib.suppress(SetupError):
        for pid in run(f"ip netns pids {name}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run(f"ip netns delete {name}")


# The ranks


def start_rank(rank: int, namespace: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a rank in its namespace, with its share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = cores[rank * len(cores) // 2 : (rank + 1) * len(cores) // 2] or cores
    environment = {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(MASTER_PORT),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "CORES": ",".join(map(str, share)),
    }
    command = ["ip", "netns", "exec", namespace, sys.executable, str(RANK_SCRIPT), *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment})


def run_ranks(names: Sequence[str], arguments: Sequence[str]) -> int:
    """Run both ranks; a rank that fails has its peer a while to say so too.

    Returns:
        0, or the first exit code that is another.
    """
    ranks = [start_rank(rank, name, arguments) for rank, name in enumerate(names)]
    try:
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(LAST_WORDS_S)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    codes = [rank.wait() for rank in ranks]
    return next((max(code, 1) for code in codes if code != 0), 0)


def stop(*_: object) -> None:
    """Leave as an exception does, so that the link is taken down."""
    sys.exit(128 + signal.SIGTERM)


@click.command()
@click.option("--gbit", default=1.0, show_default=True, help="Rate of the link, 10^9 bit/s.")
@click.option("--mtu", default=1500, show_default=True, help="Of the link.")
@click.option("--burst-kib", default=256, show_default=True, help="Of the token bucket.")
@click.option("--congestion", help="TCP's congestion control.  [default: the machine's]")
@click.option("--tokens", default=4096, show_default=True, help="Of a rank.")
@click.option("--hidden", default=7168, show_default=True, help="Elements of a token.")
@click.option("--experts", default=64, show_default=True, help="On both ranks together.")
@click.option("--topk", default=8, show_default=True, help="Experts of a token.")
@click.option("--warmup", default=2, show_default=True, help="Untimed calls before.")
@click.option("--iterations", default=7, show_default=True, help="Timed calls.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write everything here.")
def main(
    gbit: float,
    mtu: int,
    burst_kib: int,
    congestion: str | None,
    json_file: str | None,
    **sizes: int,
) -> None:
    """Measure every wire format between two network namespaces; needs root."""
    check_usable()
    signal.signal(signal.SIGTERM, stop)
    link = Link(gbit, burst_kib, mtu, congestion)
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    arguments += [f"--gbit={gbit}", f"--mtu={mtu}", f"--qdisc={link.qdisc}"]
    arguments += [] if json_file is None else [f"--json={Path(json_file).absolute()}"]
    with two_namespaces(link) as names:
        code = run_ranks(names, arguments)
    sys.exit(code)


if __name__ == "__main__":
    main()
