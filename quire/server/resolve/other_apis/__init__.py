"""Translates other APIs' requests to chats."""
