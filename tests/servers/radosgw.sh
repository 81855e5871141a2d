#!/usr/bin/env bash
# A Ceph cluster of one monitor, one OSD (bluestore) and one S3 gateway on loopback, in the foreground; TERM stops it.
#   radosgw.sh DIR RGWPORT MONPORT        DIR is initialised on first use and survives a kill with committed data intact.
dir=$1 port=$2 monitor=$3
conf="-c $dir/ceph.conf"
stop() { trap - TERM INT; kill $(jobs -p) 2>/dev/null; wait; exit 0; }
trap stop TERM INT
is_new=
if [ ! -f "$dir/ready" ]; then
  rm -rf "$dir"
  mkdir -p "$dir"/{mon,osd,rgw,run,log}
  fsid=$(cat /proc/sys/kernel/random/uuid)
  cat > "$dir/ceph.conf" <<CONF
[global]
fsid=$fsid
mon host=[v1:127.0.0.1:$monitor]
public addr=127.0.0.1
cluster addr=127.0.0.1
auth cluster required=none
auth service required=none
auth client required=none
osd pool default size=1
osd pool default min size=1
osd pool default pg num=8
osd pool default pg autoscale mode=off
osd crush chooseleaf type=0
mon allow pool size one=true
mon max pg per osd=1000
mon data avail crit=1
mon data avail warn=1
run dir=$dir/run
admin socket=$dir/run/\$name.asok
pid file=$dir/run/\$name.pid
log file=$dir/log/\$name.log
debug ms=0/0
debug osd=0/1
debug rgw=0/1
osd objectstore=bluestore
bluestore block size=34359738368
osd memory target=939524096
osd data=$dir/osd
mon data=$dir/mon
setuser match path=
osd fast shutdown=true
osd crush update on start=false
osd class update on start=false
[client.rgw]
rgw frontends=beast endpoint=127.0.0.1:$port tcp_nodelay=1
rgw thread pool size=64
rgw gc obj min wait=0
rgw gc processor period=5
rgw dynamic resharding=false
rgw enable usage log=false
CONF
  monmaptool --create --clobber --fsid "$fsid" --addv a "[v1:127.0.0.1:$monitor]" "$dir/monmap" >/dev/null
  ceph-mon --mkfs -i a --monmap "$dir/monmap" $conf >/dev/null
  is_new=1
fi
ceph-mon -f -i a $conf &
for _ in $(seq 100); do timeout 10 ceph $conf -s >/dev/null 2>&1 && break; sleep .1; done
if [ -n "$is_new" ]; then
  ceph $conf osd create >/dev/null
  ceph-osd -i 0 --mkfs $conf >/dev/null 2>&1
  ceph $conf osd crush add osd.0 1.0 root=default host=h >/dev/null 2>&1
fi
ceph-osd -f -i 0 $conf &
if [ -n "$is_new" ]; then
  for _ in $(seq 100); do ceph $conf osd stat 2>/dev/null | grep -q "1 up" && break; sleep .1; done
  timeout 60 radosgw-admin $conf user create --uid=t --display-name=t --access-key=testkey12345 --secret-key=testsecret12345 >/dev/null 2>&1
  touch "$dir/ready"
fi
radosgw -f -n client.rgw $conf &
wait
