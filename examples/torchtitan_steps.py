"""torchtitan, recorded: torchrun --nproc-per-node 8 examples/torchtitan_steps.py --module llama3 --config llama3_8b

It takes torchtitan's options. The record has the first 5 steps as warm-up and 20 measured ones of every rank.
"""

from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

import steplab

init_logger()
trainer = ConfigManager().parse_args().build()
with steplab.recorder("torchtitan", steps=20, model=trainer.model_parts[0]) as rec:
    # rec.step() and rec.phase() are decorators too
    trainer.train_step = rec.step()(trainer.train_step)
    trainer.forward_backward_step = rec.phase("forward and backward")(trainer.forward_backward_step)
    trainer.optimizers.step = rec.phase("optimizer")(trainer.optimizers.step)
    trainer.train()
trainer.close()
