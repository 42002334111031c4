"""Dense and LoRA linears of a GPU."""
