"""ZeroMQ sockets of the lookup RPC."""

import zmq


def without_queue_limit(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """Remove the limit on queued messages, at which ZeroMQ drops messages or blocks.

    Other parts of the connector limit how many there are.
    """
    socket.set_hwm(0)
    return socket
