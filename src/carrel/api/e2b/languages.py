"""Languages of the code interpreter that are not Python, as texts that a sandbox runs. Pure."""

from __future__ import annotations

_BASH = """[ -f /tmp/.{name} ] && . /tmp/.{name} 2>/dev/null
trap 'e2b_status=$?; {{ declare -p | grep -v "^declare -[a-zA-Z]*r"; declare -f; printf "cd -- %q\\n" "$PWD"; }} \
> /tmp/.{name} 2>/dev/null; exit $e2b_status' EXIT
{code}
"""

_NODE = """
const vm = require('vm'), fs = require('fs'), util = require('util');
globalThis.require = require;
require('readline').createInterface({input: process.stdin}).on('line', async (line) => {
  const code = JSON.parse(line), answer = {};
  try {
    let value;
    try { value = vm.runInThisContext(code, {filename: 'cell.js'}); }
    catch (error) {
      if (!(error instanceof SyntaxError) || !/\\bawait\\b/.test(code)) throw error;
      value = vm.runInThisContext('(async () => {' + code + '\\n})()', {filename: 'cell.js'});
    }
    value = await value;
    if (value !== undefined) answer.text = typeof value === 'string' ? value : util.inspect(value);
  } catch (error) {
    const known = error !== null && typeof error === 'object';
    answer.error = [String(known && error.name || 'Error'), String(known && error.message || error),
      String(known && error.stack || error)];
  }
  fs.writeSync(Number(process.env.CARREL_RESULTS), JSON.stringify(answer) + '\\n');
});
"""

_JAVASCRIPT = """
class JavaScriptError(Exception):
    pass

class _E2bValue:
    def __init__(self, text):
        self.text = text
    def _repr_mimebundle_(self):
        return {{"text/plain": self.text}}

def _e2b_javascript(code):
    import json, os, subprocess
    global _e2b_node
    if "_e2b_node" not in globals() or _e2b_node[0].poll() is not None:
        reading, writing = os.pipe()
        try:
            made = subprocess.Popen(
                ["node", "-e", {node!r}], stdin=subprocess.PIPE, pass_fds=[writing],
                env=dict(os.environ, CARREL_RESULTS=str(writing)),
            )
        except FileNotFoundError:
            raise JavaScriptError("Error\\0there is no Node.js in this sandbox: use an image that has it\\0") from None
        finally:
            os.close(writing)
        _e2b_node = made, os.fdopen(reading)
    process, results = _e2b_node
    try:
        process.stdin.write(json.dumps(code).encode() + b"\\n")
        process.stdin.flush()
        line = results.readline()
    except BaseException:
        process.kill()
        raise
    if not line:
        raise JavaScriptError("Error\\0Node.js ended with exit code %s\\0" % process.wait())
    answer = json.loads(line)
    if "error" in answer:
        raise JavaScriptError("\\0".join(answer["error"]))
    return _E2bValue(answer["text"]) if "text" in answer else None

_e2b_javascript({code!r})
"""


def bash_text(name: str, code: str) -> str:
    """Return code as one bash program: variables, functions and the directory are kept for the next of this name."""
    return _BASH.format(name=name, code=code)


def javascript_cell(code: str) -> str:
    """Return JavaScript as a cell of Python: one Node.js runs all cells of a context."""
    return _JAVASCRIPT.format(node=_NODE, code=code)
