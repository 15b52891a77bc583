"""The command line: `python -m pd_relay --help`."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from typing import NoReturn

from aiohttp import web

from pd_relay.log import log
from pd_relay.server import Network, Relay, Settings
from pd_relay.workers import Health, normal_url


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; status 2."""

    def error(self, message: str) -> NoReturn:
        """Without the usage, which would hide it."""
        self.exit(2, f"pd-relay: {message}; see --help\n")


def url(text: str) -> str:
    """A worker."""
    try:
        return normal_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def network(text: str) -> Network:
    """An address or a network."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> float:
    """Seconds, or bytes."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def whole(text: str) -> int:
    """A count."""
    value = positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def parser() -> argparse.ArgumentParser:
    """What may be asked for. Times are seconds."""
    told = Parser(
        prog="pd-relay", description="One prefill and one decode request over NIXL for each request.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    told.add_argument("--host", default="127.0.0.1", help="address to listen on")
    told.add_argument("--port", type=whole, default=30020, help="port to listen on")
    for role in ("prefill", "decode"):
        told.add_argument(
            f"--{role}", type=url, action="append", default=[], metavar="URL", help="repeat for each worker"
        )
    told.add_argument(
        "--controllers", type=network, nargs="*", default=[], metavar="NETWORK",
        help="who may change workers and broadcast; nobody else",
    )  # fmt: skip
    told.add_argument(
        "--request-timeout", type=positive, default=1800, help="longest request, stream included"
    )
    told.add_argument("--control-timeout", type=positive, default=900, help="longest broadcast")
    told.add_argument(
        "--drain-timeout", type=positive, default=30, help="for requests that run, after SIGTERM"
    )
    told.add_argument("--max-body", type=whole, default=64 * 2**20, help="largest request, bytes")
    told.add_argument("--health-interval", type=positive, default=5, help="between two looks at a worker")
    told.add_argument("--health-timeout", type=positive, default=5, help="for its answer")
    told.add_argument("--health-failures", type=whole, default=2, help="in a row: it gets no more requests")
    told.add_argument("--health-successes", type=whole, default=1, help="in a row: it gets requests again")
    return told


def main() -> None:
    """Serve until SIGTERM."""
    told = parser()
    options = told.parse_args()
    urls = options.prefill + options.decode
    if twice := {one for one in urls if urls.count(one) > 1}:
        told.error(f"{', '.join(sorted(twice))} is given twice")
    settings = Settings(
        prefill=options.prefill,
        decode=options.decode,
        controllers=options.controllers,
        request_timeout=options.request_timeout,
        control_timeout=options.control_timeout,
        max_body=options.max_body,
        health=Health(
            interval=options.health_interval,
            timeout=options.health_timeout,
            failures=options.health_failures,
            successes=options.health_successes,
        ),
    )
    log("starting", host=options.host, port=options.port)
    try:
        web.run_app(
            Relay(settings).app(),
            host=options.host,
            port=options.port,
            shutdown_timeout=options.drain_timeout,
            # A client that goes takes its requests to the engines with it.
            handler_cancellation=True,
            access_log=None,
            print=None,
            backlog=4096,
        )
    except OSError as error:
        sys.exit(f"pd-relay: cannot listen on {options.host}:{options.port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
