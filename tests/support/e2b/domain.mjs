// A sandbox by E2B_DOMAIN: no URL is given, so every name is below the domain. The proxy knows the names.
import { Sandbox } from '@e2b/code-interpreter'
import assert from 'node:assert'

const box = await Sandbox.create({ proxy: process.env.TEST_PROXY })
assert.equal(box.getHost(3000), `3000-${box.sandboxId}.${process.env.E2B_DOMAIN}`)
assert.equal((await box.commands.run('echo $((6 * 7))')).stdout, '42\n')
await box.files.write('a', 'b')
assert.equal(await box.files.read('a'), 'b')
assert.ok(await box.kill())
