"""An MCP server of one tool, without a package: started by tests, spoken to over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
import time

TOOL = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def answer(method: str, params: dict) -> dict | None:  # type: ignore[type-arg]
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "sums", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        if params["arguments"]["a"] == 15:
            return None  # refused as a request, not as a call
        a = params["arguments"]["a"]
        b = params["arguments"]["b"]
        if a == 13:
            os._exit(1)  # a number that this server does not survive
        if a == 16:
            time.sleep(1000)  # and answers nothing else meanwhile
        if a < 0:
            return {"content": [{"type": "text", "text": "only positive ones"}], "isError": True}
        return {"content": [{"type": "text", "text": str(a * b)}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    if request.get("params", {}).get("arguments", {}).get("a") == 14:
        continue  # it never says anything about this one
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    result = answer(request["method"], request.get("params", {}))
    reply |= (
        {"error": {"code": -32601, "message": "no such method"}}
        if result is None
        else {"result": result}
    )
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
