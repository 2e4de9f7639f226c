"""The campaign as a command: `python -m campaign --help`."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
# DDP warns of every model, for each of its ranks.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

#: Cases that run in the same processes, with the same numbers of ranks.
TOGETHER = 8


def main() -> int:
    """Plays cases; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="where to begin")
    parser.add_argument("--count", type=int, help="how many cases")
    parser.add_argument("--minutes", type=float, help="for how long")
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--tries", type=int, default=30, help="how often to try to make a failure smaller")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    arguments = parser.parse_args()

    from campaign.case import case_of
    from campaign.play import Player
    from campaign.run import batches, report

    player = Player()
    if arguments.case:
        case = case_of(arguments.case)
        outcome = player.play([case])[0]
        print(outcome.how, outcome.text)
        return outcome.how == "failed"
    end = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    count = arguments.count if arguments.count is not None else (None if end else 100)
    hows: collections.Counter[str] = collections.Counter()
    failures = 0
    for cases in batches(arguments.seed, TOGETHER):
        if (end and time.monotonic() > end) or (count is not None and sum(hows.values()) >= count):
            break
        for case, outcome in zip(cases, player.play(cases)):
            hows[outcome.how] += 1
            if arguments.verbose or outcome.how == "failed":
                print(f"seed {case.seed}: {outcome.how} {outcome.text.splitlines()[0][:150] if outcome.text else ''}", flush=True)
            if outcome.how == "failed":
                failures += 1
                print(report(player, case, outcome, arguments.tries), flush=True)
                if not arguments.keep_going:
                    return 1
        print(f"to seed {cases[-1].seed}: {dict(hows)}", flush=True)
    print(f"seeds from {arguments.seed}: {dict(hows)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
