#!/bin/busybox sh
# PID 1 of the initramfs: mounts the root disk, puts the guest agent on it, hands over to systemd.
# The agent travels here and not in the image, so that a new agent needs no new image and any root disk can get one.
export PATH=/bin

fail() {
    echo "forkyard: boot failed: $1"
    busybox sleep 1
    busybox poweroff -f
}

busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
echo "forkyard: milestone kernel"

root=/dev/vda
for word in $(busybox cat /proc/cmdline); do
    case $word in root=*) root=${word#root=} ;; esac
done

while read -r module; do
    busybox insmod "/modules/$module" || fail "module $module"
done < /modules/order

tries=0
until [ -b "$root" ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || fail "no root device $root"
    busybox sleep 0.1
done
busybox mount -t ext4 -o rw,noatime,discard,noinit_itable "$root" /newroot || fail "cannot mount $root"
echo "forkyard: milestone root-mounted"

install_agent() {
    units=/newroot/etc/systemd/system
    busybox rm -rf /newroot/opt/forkyard/agent &&
        busybox mkdir -p /newroot/opt/forkyard "$units/multi-user.target.wants" &&
        busybox cp -r /forkyard/agent /newroot/opt/forkyard/agent &&
        busybox mv /newroot/opt/forkyard/agent/forkyard-agent.service "$units/" &&
        busybox ln -sf ../forkyard-agent.service "$units/multi-user.target.wants/forkyard-agent.service"
}
if [ -d /forkyard/agent ]; then
    install_agent || fail "cannot install the agent"
fi

busybox umount /proc
busybox umount /sys
busybox mount --move /dev /newroot/dev
exec busybox switch_root /newroot /sbin/init
