// The package of npm finds a daemon by its domain alone, over HTTPS.
import assert from 'node:assert/strict'
import dns from 'node:dns'

// Every name is this machine.
dns.lookup = (name, options, done) => {
  const answer = typeof options === 'function' ? options : done
  if (options?.all) answer(null, [{ address: '127.0.0.1', family: 4 }])
  else answer(null, '127.0.0.1', 4)
}

async function check() {
  const { Sandbox } = await import('e2b')
  const made = await Sandbox.create({ timeoutMs: 300_000 })
  try {
    assert.equal((await made.commands.run('echo over TLS')).stdout, 'over TLS\n')
    const path = '/tmp/e2b-domain-npm.txt'
    await made.files.write(path, 'x')
    assert.equal(await made.files.read(path), 'x')
    assert(made.getHost(3000).startsWith(`3000-${made.sandboxId}.fork.test`))
    await made.files.remove(path)
  } finally {
    assert(await made.kill())
  }
}

let wrong = null
try {
  await check()
} catch (error) {
  wrong = String(error?.stack ?? error) + (error?.cause ? ` because ${error.cause?.stack ?? error.cause}` : '')
}
console.log(JSON.stringify({ call: 'by its domain', wrong }))
process.exit(0)
