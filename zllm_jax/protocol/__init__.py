"""Wire dicts <-> values, one module a protocol.

Knows each protocol's fields, defaults and error objects. Must not know how bytes travel (that is the server's),
how a prompt is rendered (the dialect's), or where state lives; and no protocol knows another.
"""
