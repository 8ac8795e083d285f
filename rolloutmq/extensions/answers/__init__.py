"""Reading of answers in text, and the judges that compare them with a ground truth."""

from __future__ import annotations

from producer_workers.config.task import NamedJudge

GSM8K = NamedJudge(f"{__name__}.judges:gsm8k", "equal final number", f"{__name__}.truths:number_of")
MATH_VERIFY = NamedJudge(
    f"{__name__}.judges:math_verify",
    "mathematical equality (extra `math`)",
    f"{__name__}.truths:truth_of",
    is_unsafe=True,  # simplifying may never end
)
