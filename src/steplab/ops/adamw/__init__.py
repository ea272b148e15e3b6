"""AdamW in one Triton kernel, for float32 parameters and for bfloat16 weights with float32 masters: see optimizer."""
