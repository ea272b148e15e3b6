"""What an optimizer's update moves: how often it reads or writes something as large as the weights."""

UPDATE_PASSES = {"adamw_fused": 7, "adamw_foreach": 20, "adamw_loop": 20, "sgd": 3}
"""In one kernel AdamW reads parameter, gradient and two moments and writes all but the gradient. Operator by operator
it makes 20 passes: decay 2, first moment 3 (lerp), second moment 2 + 3 (mul, addcmul), root 2, correction 2, epsilon 2,
update 4 (addcdiv). A test counts them as torch runs."""
