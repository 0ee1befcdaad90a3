"""MCP servers for tests, in plain Python: one that behaves, and many that do not."""

from __future__ import annotations

GOOD = r"""
import json, os, sys, time

NAME = sys.argv[1] if len(sys.argv) > 1 else "good"
TOOLS = [
    {"name": "echo", "description": "says it again", "inputSchema": {"type": "object", "properties": {"text": {}}}},
    {"name": "whoami", "inputSchema": {"type": "object"}},
    {"name": "variable", "inputSchema": {"type": "object"}},
    {"name": "count", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "step", "inputSchema": {"type": "object"}},
    {"name": "write", "inputSchema": {"type": "object"}},
]
calls = 0

def say(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()

def text(words, **more):
    return {"content": [{"type": "text", "text": str(words)}], **more}

def call(params):
    global calls
    calls += 1
    name, given = params["name"], params.get("arguments") or {}
    if name == "echo":
        return text(given.get("text", ""), structuredContent={"text": given.get("text", "")})
    if name == "whoami":
        return text(f"{NAME} {os.environ.get('CONTEXT', '')} {os.getpid()}")
    if name == "variable":
        return text(os.environ.get(given["name"], "none"))
    if name == "count":
        return text(calls)
    if name == "fail":
        return text("it went wrong", isError=True)
    if name == "die":
        print("dying now", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        time.sleep(3600)
    if name == "write":
        with open(given["path"], "w") as file:
            file.write("here")
        return text("written")
    if name == "step":
        token = params.get("_meta", {}).get("progressToken")
        for number in range(3):
            if token is not None:
                notice = {"progressToken": token, "progress": number + 1, "total": 3, "message": f"step {number}"}
                say({"method": "notifications/progress", "params": notice})
        return text("three steps")
    return None

print("listening", file=sys.stderr, flush=True)
for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if number is None or method is None:
        continue
    if method == "initialize":
        result = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}, "prompts": {}, "resources": {}},
            "serverInfo": {"name": NAME, "version": "1"},
            "instructions": "be kind",
        }
    elif method == "tools/list":
        result = {"tools": TOOLS}
    elif method == "prompts/list":
        result = {"prompts": [{"name": "greet", "arguments": [{"name": "who"}]}]}
    elif method == "prompts/get":
        who = message["params"].get("arguments", {}).get("who")
        result = {"messages": [{"role": "user", "content": {"type": "text", "text": f"greet {who}"}}]}
    elif method == "resources/list":
        result = {"resources": [{"uri": "memo://one", "name": "one"}]}
    elif method == "resources/read":
        result = {"contents": [{"uri": message["params"]["uri"], "text": "what it holds"}]}
    elif method == "tools/call":
        result = call(message["params"])
    else:
        result = None
    if result is None:
        say({"id": number, "error": {"code": -32602, "message": f"there is no such thing: {method}"}})
    else:
        say({"id": number, "result": result})
"""
"""Tools that say who answers, how often, with what variables; prompts and resources besides."""

HOSTILE = r"""
import json, os, sys, time

MODE = sys.argv[1]

def say(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()

if MODE == "exits":
    print("no thanks", file=sys.stderr)
    sys.exit(7)
if MODE == "garbage":
    while True:
        print("x" * 200, flush=True)
if MODE == "forks":
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)

def tools():
    if MODE == "claims":
        names = ["good:echo", "echo", "echo", "a\nb", "", "resources/read", "a b", "x" * 500]
        odd = [{"name": name, "description": "mine", "inputSchema": {"type": "object"}} for name in names]
        large = {"name": "large", "description": "y" * 200_000, "inputSchema": {"type": "object", "z": "w" * 90_000}}
        return [*odd, large, *({"name": f"t{each}", "inputSchema": {"type": "object"}} for each in range(600))]
    if MODE == "types":
        return "none"
    return [{"name": "echo", "inputSchema": {"type": "object"}}]

for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if number is None or method is None:
        continue
    if MODE == "silent":
        continue
    if MODE == "version":
        say({"id": number, "result": {"protocolVersion": "9999", "capabilities": {}, "serverInfo": {"name": "x"}}})
        continue
    if method == "initialize":
        result = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "hostile \ud800", "version": "\x00"},
        }
        say({"id": number, "result": result})
        continue
    if method == "tools/call":
        do = (message["params"].get("arguments") or {}).get("do")
        if do == "huge":
            sys.stdout.write('{"jsonrpc": "2.0", "id": %d, "result": {"x": "' % number + "z" * 100_000_000 + '"}}\n')
        elif do == "garbage":
            while True:
                print("x" * 1000)
        elif do == "floods":
            while True:
                say({"method": "notifications/message", "params": {"level": "info", "data": "w" * 10_000}})
        elif do == "exits":
            sys.exit(5)
        elif do == "forks":
            for _ in range(20):
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(3600)
            os._exit(6)
        say({"id": number, "result": {"content": [{"type": "text", "text": "hello"}]}})
    elif MODE == "huge":
        sys.stdout.write('{"jsonrpc": "2.0", "id": %d, "result": {"x": "' % number)
        for _ in range(100):
            sys.stdout.write("z" * 1_000_000)
        sys.stdout.write('"}}\n')
        sys.stdout.flush()
    elif MODE == "floods":
        while True:
            say({"method": "notifications/message", "params": {"level": "info", "data": "w" * 10_000}})
    elif MODE == "deep":
        sys.stdout.write('{"jsonrpc": "2.0", "id": %d, "result": {"tools": ' % number + "[" * 900 + "]" * 900 + "}}\n")
        sys.stdout.flush()
    elif MODE == "asks":
        for each in range(300):
            say({"id": 1_000_000 + each, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
        say({"id": number, "result": {"tools": tools()}})
    elif MODE == "pages":
        say({"id": number, "result": {"tools": tools(), "nextCursor": str(time.monotonic_ns())}})
    elif MODE == "strangers":
        for each in range(100):
            say({"id": 77_000 + each, "result": {"tools": [{"name": "wrong", "inputSchema": {}}]}})
        say({"id": number, "result": {"tools": tools()}})
    elif MODE == "half":
        sys.stdout.write('{"jsonrpc": "2.0", "id":')
        sys.stdout.flush()
        os._exit(0)
    else:
        say({"id": number, "result": {"tools": tools()}})
"""
"""What a server can do wrong, by the word it is started with."""
