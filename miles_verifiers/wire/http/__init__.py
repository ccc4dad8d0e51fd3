"""HTTP/1.1 as the wire needs it, and no more: JSON both ways, on connections that are kept.

    framing      what requests and answers share: headers, chunks (RFC 9112)
    answers      bytes of an engine's answer -> Answer         connections  POST to engines, and keep the connection
    requests     bytes of a caller's request -> Request        server       answer callers, and know when one goes away

Why this is our own: aiohttp's client and server (3.14, side by side) took two to three times the CPU per request, more than
all of the wire's checking and translating, and the process that pays it also runs every rollout.
"""
