"""How large a piece of the weights should be on a CPU: the Bayesian step against the plain one.

python benchmarks/cpu_pieces.py > pieces.json
"""

import json

from bayesrnn.bayes import block
from bayesrnn.bench import bench


def main() -> None:
    found = {}
    for power in (14, 16, 17, 18, 19, 20, 30):  # 2^30: every weight whole
        block.PIECE = 1 << power
        timings = {t.case: t for t in bench("medium", "cpu", steps=10)}
        found[f"2^{power}"] = {
            "ms": timings["Bayesian, here"].ms,
            "times_plain": timings["Bayesian, here"].times_plain,
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
