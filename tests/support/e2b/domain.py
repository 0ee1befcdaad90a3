"""A sandbox by E2B_DOMAIN: no URL is given, so every name is below the domain. The proxy knows the names."""

import os

from e2b_code_interpreter import Sandbox

box = Sandbox.create(proxy=os.environ["TEST_PROXY"])
assert box.get_host(3000) == f"3000-{box.sandbox_id}.{os.environ['E2B_DOMAIN']}"
assert box.commands.run("echo $((6 * 7))").stdout == "42\n"
box.files.write("a", "b")
assert box.files.read("a") == "b"
assert box.run_code("6 * 7").text == "42"
assert box.download_url("a").startswith(f"https://49983-{box.sandbox_id}.")
assert box.is_running() and box.kill() and not box.is_running()
