"""The rounds of the CPU suite, and more of what kernels choose by: widths, layouts, top-k."""

import itertools

from rounds import ROUNDS, WIRES, Round

LAYOUTS = (("fp8", "row"), ("fp8", "column"), ("bf16", "row"), ("packed", "row"))
GPU_ROUNDS = [
    *ROUNDS,
    *(
        Round(f"{w} as {a} {s} 7168", wire=w, arrive=a, scale_layout=s, hidden=7168, tokens=(3, 5))
        for w, (a, s) in itertools.product(WIRES, LAYOUTS)
    ),
    *(Round(f"combine {w} 2880", combine=w, hidden=2880, tokens=(4,), topk=5) for w in WIRES),
    *(
        Round(f"top-{k} with -1, E {e}", topk=k, num_experts=e, tokens=(33, 0, 31), hidden=32)
        for k, e in ((1, 7), (9, 13))
    ),
    Round("FP8 input 7168", fp8_input=True, hidden=7168, tokens=(6,)),
    Round("no weights, packed", weights=None, arrive="packed", topk=9),
]
