"""Families with RMSNorms that are not Llama's, Qwen's or Gemma's own: each as it differs from one of these."""
