"""Run a command on hosts that share a switch and have shaped links: network namespaces.

    sudo .venv/bin/python benchmarks/switched_hosts.py --hosts 2 --ranks 2 --gbit 1 -- \\
        -m fp4comm bench --arrive packed --route flat,two_hop

Needs root and iproute2.  What comes after -- are arguments of Python; each host runs them on its
ranks as a job of torch.distributed, with one kernel thread each; gloo is its network.

Each host is a namespace with one link to a bridge, which is in a namespace of its own; both ends of
a link send through a token bucket (tc tbf) of its rate, so that what comes to a host is limited
too.  Namespaces carry this process's id in their names and are taken down whatever happens.

Exit code: 0; 1 if a rank failed; 2 without root or iproute2, or for a wrong argument.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import click
from two_hosts import (
    INTERFACE,
    LAST_WORDS_S,
    PREFIX,
    Link,
    check_usable,
    remove,
    remove_leftovers,
    run,
    stop,
)

ADDRESS = "10.99.5.{}"
MASTER_PORT = 29557


@contextlib.contextmanager
def switched_hosts(num_hosts: int, link: Link) -> Iterator[list[str]]:
    """Make hosts and their switch, and take them down again, processes in them included."""
    remove_leftovers()
    switch = f"{PREFIX}-{os.getpid()}-switch"
    hosts = [f"{PREFIX}-{os.getpid()}-host{n}" for n in range(num_hosts)]
    try:
        for name in (switch, *hosts):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
        run(f"ip -n {switch} link add bridge0 type bridge")
        run(f"ip -n {switch} link set bridge0 up")
        for n, host in enumerate(hosts):
            port = f"port{n}"
            run(f"ip -n {host} link add {INTERFACE} type veth peer {port} netns {switch}")
            run(f"ip -n {host} address add {ADDRESS.format(n + 1)}/24 dev {INTERFACE}")
            run(f"ip -n {switch} link set {port} master bridge0")
            for name, interface in ((host, INTERFACE), (switch, port)):
                run(f"ip -n {name} link set {interface} mtu {link.mtu} up")
                run(f"tc -n {name} qdisc add dev {interface} root {link.qdisc}")
        yield hosts
    finally:
        for name in (*hosts, switch):
            remove(name)


def run_on_hosts(hosts: Sequence[str], ranks_per_host: int, arguments: Sequence[str]) -> str:
    """Run a Python command as ranks of torch.distributed, host by host.

    Returns:
        what rank 0 printed.

    Raises:
        SystemExit: a rank failed.
    """
    world = len(hosts) * ranks_per_host
    ranks = []
    for rank in range(world):
        host = hosts[rank // ranks_per_host]
        environment = {
            **os.environ,
            "MASTER_ADDR": ADDRESS.format(1),
            "MASTER_PORT": str(MASTER_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_HOSTID": host,  # the name by which hosts of one machine are told apart
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", host, sys.executable, *arguments]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
    try:
        printed, _ = ranks[0].communicate()
        end = time.monotonic() + LAST_WORDS_S
        for process in ranks[1:]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    if any(process.wait() != 0 for process in ranks):
        raise SystemExit(1)
    return printed


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--hosts", type=click.IntRange(2, 250), default=2, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Of a host.")
@click.option("--gbit", default=1.0, show_default=True, help="Rate of a link, 10^9 bit/s.")
@click.option("--mtu", default=1500, show_default=True, help="Of a link.")
@click.option("--burst-kib", default=256, show_default=True, help="Of the token bucket.")
@click.argument("arguments", nargs=-1, required=True)
def main(
    hosts: int, ranks: int, gbit: float, mtu: int, burst_kib: int, arguments: tuple[str, ...]
) -> None:
    """Run Python with ARGUMENTS as ranks on hosts that are network namespaces."""
    check_usable()
    signal.signal(signal.SIGTERM, stop)
    with switched_hosts(hosts, Link(gbit, burst_kib, mtu, None)) as names:
        click.echo(run_on_hosts(names, ranks, arguments), nl=False)


if __name__ == "__main__":
    main()
