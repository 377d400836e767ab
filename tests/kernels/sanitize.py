"""Every launcher once, at small sizes, for a run under compute-sanitizer; what it computes is checked as well.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/sanitize.py [NAME ..]

NAME keeps the cases whose name contains one. Exit 1 if a result is wrong; a bad access or a race is the tool's to find.
"""

import sys

from ddtree.bench_cases import all_cases
from ddtree.bench_kernels import run_checked
from ddtree.errors import UsageError
from ddtree.ops.graphs import GpuStream, require_gpu


def main(names):
    """Run the quick cases; the exit code."""
    try:
        require_gpu("sanitize")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    stream = GpuStream()
    chosen = [case for case in all_cases(quick=True) if not names or any(name in case.name for name in names)]
    wrong = 0
    for case in chosen:
        try:
            run_checked(case.prepare(), stream)
            print(f"ok    {case.name}", flush=True)
        except Exception as error:  # the rest is still to be run
            wrong += 1
            print(f"WRONG {case.name}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(chosen)} launches, {wrong} wrong")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
