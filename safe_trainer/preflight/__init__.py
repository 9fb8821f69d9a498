"""The checks before a run, in the order in which they are made: cheap ones first. `check_program` makes them.

Each check is a function of a program and a clock that gives a CheckResult, in a file of its own. It may do with the
program what it likes: the runner puts everything back after each one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from safe_trainer.findings import CheckResult, Status
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed, Skip
from safe_trainer.preflight.program import Program

log = logging.getLogger(__name__)

__all__ = ["Program", "check_functions", "check_program"]

Check = Callable[[Program, Clock], CheckResult]


def check_functions() -> dict[str, tuple[Check, float]]:
    """Each check by its id, with the share of the time left that it may take; the last ones have what others leave."""
    from safe_trainer.preflight import data, gradcheck, init, learning_rate, modes, overfit, short_run, summary, wiring

    return {
        "summary": (summary.check, 0.1),
        "data": (data.check, 0.3),
        "init": (init.check, 0.25),
        "wiring": (wiring.check, 0.25),
        "modes": (modes.check, 0.25),
        "gradcheck": (gradcheck.check, 0.35),
        "overfit": (overfit.check, 0.5),
        "learning_rate": (learning_rate.check, 0.5),
        "short_run": (short_run.check, 0.8),
    }


def check_program(
    program: Program, names: Sequence[str] | None, budget_s: float, tell: Callable[[str, CheckResult | None], None]
) -> list[CheckResult]:
    """Make the checks of these ids (None is all), in their order.

    Args:
        budget_s: seconds for all of them; one that would not fit is skipped with that reason, never passed.
        tell: called with a check's id and None when it begins, and with its result when it is over.
    """
    clock, results = Clock(budget_s), []
    for name, (check, share) in check_functions().items():
        if names is None or name in names:
            tell(name, None)
            result = _made(name, check, program, clock.part(share))
            tell(name, result)
            results.append(result)
    return results


def _made(name: str, check: Check, program: Program, clock: Clock) -> CheckResult:
    """One check, all put back afterwards. What keeps it from looking is a reason to skip; it never ends a run."""
    try:
        if clock.seconds <= 0:
            raise Skip("preflight.budget_s is used up")
        with program.preserved():
            result = check(program, clock)
    except Skip as reason:
        result = CheckResult(name=name, status=Status.skipped, evidence=str(reason))
    except ProgramFailed as failure:
        result = CheckResult(name=name, status=Status.skipped, evidence=f"the program itself failed: {failure}")
    except Exception as error:
        log.debug("The check %s failed.", name, exc_info=True)
        why = f"the check itself failed: {type(error).__name__}: {error}"
        result = CheckResult(name=name, status=Status.skipped, evidence=why)
    return replace(result, name=name, seconds=clock.spent())
