// Domains: shown to be somebody's by a record of the test's own name server, mapped to a VM, to a fork of it, to nothing.
import { writeFileSync } from 'node:fs'
import { request } from 'node:http'
import { assert, call, fails, until } from './registry.js'

const DOMAIN = `app-${process.pid}.example.com`
const OTHER = `other-${process.pid}.example.com`
const PORT = 8123

// As whoever manages the domain does.
function publish(record) {
  writeFileSync(`${process.env.COMPAT_ZONE}/${record.name}`, record.value)
}

// A visitor of the domain, whose name leads to this daemon.
function visit(domain) {
  return new Promise((done, failed) => {
    const asked = request(process.env.FREESTYLE_API_URL, { headers: { Host: domain } }, async (answer) => {
      answer.setEncoding('utf8')
      done({ status: answer.statusCode, text: (await answer.toArray()).join('').trim() })
    })
    asked.on('error', failed).end()
  })
}

call('domains.verifications.create', async (y) => {
  const made = await y.fs.domains.verifications.create({ domain: DOMAIN })
  assert.deepEqual([made.record.type, made.record.name], ['TXT', `_freestyle_custom_hostname.${DOMAIN}`])
  y.verification = made
})

call('domains.verifications.list', async (y) => {
  const found = await y.fs.domains.verifications.list()
  assert.equal(found.find((one) => one.domain === DOMAIN).verificationCode, y.verification.record.value)
})

call('domains.verifications.complete: not set', async (y) => {
  await fails('FAILED_TO_VERIFY_DOMAIN', () => y.fs.domains.verifications.complete({ domain: DOMAIN }))
})

call('domains.list', async (y) => {
  assert(!(await y.fs.domains.list()).some((one) => one.domain === DOMAIN))
})

call('domains.mappings.create: not verified', async (y) => {
  await fails('DOMAIN_OWNERSHIP_NOT_VERIFIED', () => y.fs.domains.mappings.create({ domain: DOMAIN, vmId: y.vmId, vmPort: 80 }))
})

call('domains.mappings.list', async (y) => {
  assert.deepEqual((await y.fs.domains.mappings.list({ domain: DOMAIN })).mappings, [])
})

call('domains.mappings.delete: not mapped', async (y) => {
  await fails('FAILED_REMOVE_DOMAIN_MAPPING', () => y.fs.domains.mappings.delete({ domain: DOMAIN }))
})

call('domains.certificates.createWildcard: not verified', async (y) => {
  await fails('DOMAIN_OWNERSHIP_NOT_VERIFIED', () => y.fs.domains.certificates.createWildcard({ domain: DOMAIN }))
})

call('domains.verifications.complete', async (y) => {
  publish(y.verification.record)
  assert.deepEqual(await y.fs.domains.verifications.complete({ domain: DOMAIN }), { domain: DOMAIN })
  assert(!(await y.fs.domains.verifications.list()).some((one) => one.domain === DOMAIN))
  const found = (await y.fs.domains.list()).find((one) => one.domain === DOMAIN)
  assert.equal(found.verifiedDns, true)
})

call('domains.verifications.complete: verificationId', async (y) => {
  const made = await y.fs.domains.verifications.create({ domain: OTHER })
  publish(made.record)
  assert.equal((await y.fs.domains.verifications.complete({ verificationId: made.verificationId })).domain, OTHER)
})

call('domains.certificates.createWildcard', async (y) => {
  assert.equal((await y.fs.domains.certificates.createWildcard({ domain: DOMAIN })).domain, DOMAIN)
})

call('domains.mappings.create', async (y) => {
  const made = await y.fs.domains.mappings.create({ domain: DOMAIN, vmId: y.vmId, vmPort: PORT })
  assert.deepEqual([made.domain, made.vmId, made.vmPort], [DOMAIN, y.vmId, PORT])
  const rows = async (options) => (await y.fs.domains.mappings.list(options)).mappings.map((one) => [one.id, one.vmId])
  assert.deepEqual(await rows({ domain: DOMAIN }), [[made.id, y.vmId]])
  assert.deepEqual(await rows({ domainOwnership: made.ownershipId }), [[made.id, y.vmId]])
  assert.deepEqual(await rows({ domain: OTHER }), [])
})

call('domains.mappings.create: unknown VM', async (y) => {
  await fails('VM_NOT_FOUND', () => y.fs.domains.mappings.create({ domain: OTHER, vmId: 'i0000000000000000000', vmPort: PORT }))
})

call('domains.mappings: a visitor reaches the VM, then its fork, then nobody', async (y) => {
  await y.vm.exec(`mkdir -p /srv/site && cd /srv/site && echo parent > index.html && (setsid python3 -m http.server ${PORT} >/dev/null 2>&1 &)`)
  await until(async () => (await visit(DOMAIN)).text === 'parent', 60)
  const { forks } = await y.vm.fork({ count: 1 })
  await forks[0].vm.exec('echo fork > /srv/site/index.html')
  assert.equal((await visit(DOMAIN)).text, 'parent')
  await y.fs.domains.mappings.create({ domain: DOMAIN, vmId: forks[0].vmId, vmPort: PORT })
  assert.deepEqual(await visit(DOMAIN), { status: 200, text: 'fork' })
  await y.fs.domains.mappings.delete({ domain: DOMAIN })
  assert.equal((await visit(DOMAIN)).status, 404)
  await y.fs.domains.mappings.create({ domain: DOMAIN, vmId: y.vmId, vmPort: PORT })
  assert.deepEqual(await visit(DOMAIN), { status: 200, text: 'parent' })
  await forks[0].vm.delete()
}, { vm: true })

call('vms.create: domains', async (y) => {
  const { vmId, vm, domains } = await y.fs.vms.create({ domains: [{ domain: OTHER, vmPort: PORT }] })
  assert(domains.includes(OTHER), domains)
  assert.equal((await y.fs.domains.mappings.list({ domain: OTHER })).mappings[0].vmId, vmId)
  await vm.delete()
})

call('domains.mappings.delete', async (y) => {
  await y.fs.domains.mappings.delete({ domain: DOMAIN })
  assert.deepEqual((await y.fs.domains.mappings.list({ domain: DOMAIN })).mappings, [])
})

call('domains.verifications.cancel', async (y) => {
  const domain = `never-${process.pid}.example.com`
  const { record } = await y.fs.domains.verifications.create({ domain })
  const ended = await y.fs.domains.verifications.cancel({ domain, verificationCode: record.value })
  assert.deepEqual([ended.domain, ended.verificationCode], [domain, record.value])
  assert(!(await y.fs.domains.verifications.list()).some((one) => one.domain === domain))
})

call('vms.create: domains below style.dev', async (y) => {
  const { vm, domains } = await y.fs.vms.create({ domains: [{ domain: 'mine.style.dev', vmPort: 3000 }] })
  assert.match(domains[0], /^3000-/)
  await vm.delete()
})
