"""AdamW for float32 parameters in one Triton kernel: `steplab.ops.adamw.optimizer.OneKernelAdamW`."""
