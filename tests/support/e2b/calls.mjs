// Makes most calls of E2B's JavaScript SDK. Prints a JSON line for each: the call, and why it failed.
import { Sandbox } from '@e2b/code-interpreter'

let failed = 0
async function tell(call, check) {
  let why = null
  try {
    const found = await check()
    if (found !== true) why = `it returned ${JSON.stringify(found)}`
  } catch (error) { why = String(error) }
  if (why !== null) failed += 1
  console.log(JSON.stringify({ call, failed: why }))
}
async function refused(act, word) {
  try { await act() } catch (error) { return String(error).includes(word) || String(error) }
  return 'it was not refused'
}

const box = await Sandbox.create({ metadata: { by: 'javascript' }, envs: { GIVEN: 'by create' }, timeoutMs: 120_000 })
await tell('Sandbox.create', async () => (await box.commands.run('echo $GIVEN')).stdout === 'by create\n')
await tell('commands.run', async () => {
  const result = await box.commands.run('pwd; echo e >&2', { cwd: '/tmp' })
  return result.stdout === '/tmp\n' && result.stderr === 'e\n' && await refused(() => box.commands.run('exit 4'), '4')
})
await tell('commands.run(background)', async () => {
  const handle = await box.commands.run('echo a; sleep 0.1; echo b', { background: true })
  return (await handle.wait()).stdout === 'a\nb\n'
})
async function typed() {
  const handle = await box.commands.run('cat; echo done', { background: true, stdin: true })
  const listed = (await box.commands.list()).some((each) => each.pid === handle.pid)
  await box.commands.sendStdin(handle.pid, 'typed\n')
  await box.commands.closeStdin(handle.pid)
  return listed && (await handle.wait()).stdout === 'typed\ndone\n'
}
for (const name of ['commands.list', 'commands.sendStdin', 'commands.closeStdin']) await tell(name, typed)
await tell('commands.connect', async () => {
  const handle = await box.commands.run('echo early; sleep 0.3; echo late', { background: true })
  await handle.disconnect()
  return (await (await box.commands.connect(handle.pid)).wait()).stdout === 'early\nlate\n'
})
await tell('commands.kill', async () => {
  const handle = await box.commands.run('sleep 100', { background: true })
  return await handle.kill() && await box.commands.kill(5) === false && await refused(() => handle.wait(), 'killed')
})
async function terminal() {
  let shown = ''
  const pty = await box.pty.create({ cols: 80, rows: 24, onData: (data) => { shown += new TextDecoder().decode(data) } })
  await box.pty.resize(pty.pid, { cols: 100, rows: 30 })
  await box.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit\n'))
  await pty.wait()
  return shown.includes('30 100') || shown
}
await tell('pty.create', terminal)
await tell('pty.resize', terminal)

await tell('files.write', async () => (await box.files.write('n/a.txt', 'línea')).path === '/home/user/n/a.txt')
await tell('files.read', async () => {
  await box.files.write('empty', '')
  return await box.files.read('n/a.txt') === 'línea' && await box.files.read('empty') === ''
})
await tell('files.exists', async () => await box.files.exists('n') && !(await box.files.exists('nothing')))
await tell('files.getInfo', async () => (await box.files.getInfo('n/a.txt')).size === 6)
await tell('files.rename', async () => (await box.files.rename('n/a.txt', 'n/b.txt')).name === 'b.txt')
await tell('files.remove', async () => { await box.files.remove('n/b.txt'); return !(await box.files.exists('n/b.txt')) })
await tell('files.makeDir', async () => await box.files.makeDir('made') && !(await box.files.makeDir('made')))
await tell('files.writeFiles', async () =>
  (await box.files.write([{ path: 'many/0', data: '0' }, { path: 'many/1', data: '1' }])).length === 2)
await tell('files.list', async () => (await box.files.list('many')).length === 2)
await tell('files.watchDir', async () => {
  let happened
  const event = new Promise((resolve) => { happened = resolve })
  const handle = await box.files.watchDir('many', happened)
  await box.files.write('many/2', '2')
  const found = await event
  await handle.stop()
  return found.name === '2' || found
})
await tell('sandbox.downloadUrl', async () =>
  await (await fetch(await box.downloadUrl('many/1', { useSignatureExpiration: 60_000 }))).text() === '1')
await tell('sandbox.uploadUrl', async () => {
  const form = new FormData()
  form.append('file', new Blob(['sent']), 'up')
  const answer = await fetch(await box.uploadUrl('up'), { method: 'POST', body: form })
  return answer.ok && await box.files.read('up') === 'sent'
})

await tell('runCode', async () => {
  const found = await box.runCode('print("said")\n6 * 7')
  return found.text === '42' && found.logs.stdout[0] === 'said\n' && (await box.runCode('1/0')).error.name === 'ZeroDivisionError'
})
await tell('runCode(bash)', async () => (await box.runCode('echo b', { language: 'bash' })).logs.stdout[0] === 'b\n')
await tell('runCode(javascript)', async () => {
  const found = await box.runCode('1 + 1', { language: 'javascript' })
  return found.text === '2' || found.error.value.startsWith('there is no Node.js')
})
const context = await box.createCodeContext({ cwd: '/home/user/many' })
await tell('createCodeContext', async () => (await box.runCode('import os; os.path.exists("1")', { context })).text === 'True')
await tell('listCodeContexts', async () => (await box.listCodeContexts()).some((each) => each.id === context.id))
await tell('restartCodeContext', async () => { await box.restartCodeContext(context); return true })
await box.removeCodeContext(context)
await tell('removeCodeContext', () => refused(() => box.runCode('1', { context }), 'not found'))

await tell('sandbox.getInfo', async () => (await box.getInfo()).metadata.by === 'javascript')
await tell('sandbox.isRunning', () => box.isRunning())
await tell('Sandbox.list', async () =>
  (await Sandbox.list({ query: { metadata: { by: 'javascript' } } }).nextItems())[0].sandboxId === box.sandboxId)
await tell('sandbox.setTimeout', async () => {
  await box.setTimeout(1_000_000)
  return (await box.getInfo()).endAt.getTime() - Date.now() > 900_000
})
await tell('sandbox.getMetrics', async () => (await box.getMetrics())[0].cpuCount >= 1)
await tell('sandbox.createSnapshot', async () => {
  const twin = await Sandbox.create((await box.createSnapshot()).snapshotId)
  return await twin.files.read('many/1') === '1' && await twin.kill()
})
await tell('sandbox.fork', async () => {
  const [twin] = await box.fork()
  return await twin.files.read('many/1') === '1' && await twin.kill()
})
await tell('sandbox.pause', async () => { await box.pause(); return await box.isRunning() === false })
await tell('Sandbox.connect', async () => (await Sandbox.connect(box.sandboxId)).files.exists('many'))
await tell('sandbox.kill', async () => await box.kill() && !(await box.kill()))
process.exit(failed ? 1 : 0)
