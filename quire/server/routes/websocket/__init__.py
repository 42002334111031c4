"""OpenAI's Responses API over a WebSocket. Inside the server, a response.create event becomes a POST of /v1/responses
and passes the same stations.
"""
