"""OpenAI's Responses API over a WebSocket. A response.create event becomes a POST of /v1/responses and passes the same
stations.
"""
