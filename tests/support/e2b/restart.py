"""A command goes on while the server is killed and started again; nothing that it prints is lost."""

import sys

from e2b import Sandbox

box = Sandbox.create()
box.files.write("kept", "before")
handle = box.commands.run("echo first; until [ -e go ]; do sleep 0.05; done; echo last", background=True)
print(handle.pid, flush=True)
sys.stdin.readline()  # the server is killed and started now
again = box.commands.connect(handle.pid)
box.files.write("go", "")
assert again.wait().stdout == "first\nlast\n"
assert Sandbox.connect(box.sandbox_id).files.read("kept") == "before"
box.pause()
assert Sandbox.connect(box.sandbox_id).files.read("kept") == "before"
assert box.kill()
