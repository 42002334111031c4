"""Every kind of a Triton kernel that steps may launch, compiled before the first of them, by several processes."""
