"""Families with DeepSeek-V3's experts behind another attention than its own."""
