// The end.
import { assert, call, fails } from './registry.js'

call('vm.exec: in a VM that is gone', async (y) => {
  await y.vm.delete()
  await fails('VM_DELETED', () => y.vm.exec('true'))
  assert(!(await y.fs.vms.list()).vms.some((one) => one.id === y.vmId))
})
