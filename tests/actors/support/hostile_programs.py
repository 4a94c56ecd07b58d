"""Programs that print the right answer, 4, only if what they try succeeds, or else cost something.

Names in capitals stand for what the test puts there: files, ports and sockets of its own.
"""

from __future__ import annotations

TRY = """
import ctypes, errno, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
me = os.getpid()
def attempt(*ways):
    for way in ways:
        try:
            done = way()
            if os.getpid() != me: os._exit(0)
            if done is not False and done != -1:
                os.write(1, b"4\\n")
                os._exit(0)
        except (OSError, ValueError, RuntimeError, MemoryError, subprocess.SubprocessError):
            pass
"""


def _starts_processes() -> dict[str, str]:
    return {
        "fork bomb": "while True: attempt(os.fork)",
        "vfork and clone": "attempt(lambda: libc.vfork(), lambda: libc.syscall(56, 17, 0, 0, 0, 0),"
        " lambda: libc.syscall(435, bytes(88), 88))",
        "another program": "attempt(lambda: subprocess.run(['/bin/true']),"
        " lambda: os.execv(sys.executable, ['python', '-c', 'print(4)']))",
        "daemon": "attempt(lambda: os.fork() or (os.setsid(), signal.pause()))",
        "threads": """
def more(n):
    for _ in range(n): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
threading.stack_size(1 << 16)
attempt(lambda: more(SOME_THREADS))""",
    }


def _takes_what_is_scarce() -> dict[str, str]:
    return {
        "memory": "attempt(lambda: bytearray(400 << 20))",
        "memory that is no address space": "attempt(lambda: libc.memfd_create(b'x', 0),"
        " lambda: libc.shmget(0, 1 << 20, 0o1600), lambda: os.mkfifo('/tmp/x'))",
        "disk": """
def fill(folder):
    with open(folder + '/filled', 'wb') as file: file.write(bytes(1 << 20))
attempt(*[lambda f=f: fill(f) for f in ('.', '/', '/tmp', '/var/tmp', '/dev/shm', 'FOLDER')])""",
        "inodes": "attempt(*[lambda f=f: os.mkdir(f + '/made') for f in"
        " ('.', '/', '/tmp', '/dev/shm', 'FOLDER')])",
        "descriptors": "attempt(lambda: [os.dup(0) for _ in range(200)])",
        "processor": "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile time.process_time() < 2: pass\nprint(4)",
        "sleep": "time.sleep(3)\nprint(4)",
        "sleep behind a closed output": "os.close(1)\nsignal.pause()",
        "stop": "os.kill(os.getpid(), signal.SIGSTOP)\nsignal.pause()",
        "gigabytes": "while True: os.write(1, b'4' * (1 << 16))",
        "more than it may raise": "attempt(lambda: resource.setrlimit(resource.RLIMIT_AS,"
        " (1 << 33, 1 << 33)))",
    }


def _reads_what_is_ours() -> dict[str, str]:
    return {
        "keys": "attempt(lambda: open('SECRET').read())",
        "links to keys": "attempt(lambda: os.symlink('SECRET', 'FOLDER/link'),"
        " lambda: os.link('SECRET', 'FOLDER/hard'), lambda: open('LINK').read())",
        "handles of files": "attempt(lambda: libc.open_by_handle_at(-100, bytes(64), 0),"
        " lambda: libc.syscall(437, -100, b'SECRET', bytes(24), 24))",
        "folders": "attempt(lambda: os.listdir('FOLDER'), lambda: 'passwd' in os.listdir('/etc'),"
        " lambda: 'tmp' in os.listdir('/'))",
        "processes": "attempt(*[lambda f=f: open(f).read() for f in ('/proc/1/environ',"
        " '/proc/self/environ', '/proc/self/maps', f'/proc/{os.getppid()}/cmdline', '/proc/net/tcp')],"
        " lambda: os.listdir('/proc'))",
        "descriptors of the actor": "attempt(*[lambda n=n: os.fstat(n) and True for n in range(3, 500)])",
        "own environment": "attempt(lambda: 'SECRET_VALUE' in str(dict(os.environ)))",
        "devices": "attempt(*[lambda d=d: os.open('/dev/' + d, os.O_RDONLY) for d in"
        " ('mem', 'kmsg', 'vda', 'sda', 'kvm', 'fuse', 'shm')])",
        "memory of the actor": """
class Vector(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
here = ctypes.create_string_buffer(8)
vector = Vector(ctypes.addressof(here), 8)
attempt(lambda: libc.ptrace(16, os.getppid(), 0, 0), lambda: libc.ptrace(0x4206, os.getppid(), 0, 0),
    lambda: libc.process_vm_readv(os.getppid(), ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0),
    lambda: libc.syscall(434, os.getppid(), 0))""",
    }


def _changes_what_is_ours() -> dict[str, str]:
    return {
        "our files": "attempt(lambda: open('CANARY', 'w'), lambda: os.truncate('CANARY', 0),"
        " lambda: os.open('CANARY', os.O_RDONLY | os.O_TRUNC), lambda: os.unlink('CANARY'),"
        " lambda: os.chmod('CANARY', 0o777), lambda: os.utime('CANARY'))",
        "Python's own files": "attempt(lambda: open(os.__file__, 'r+b'),"
        " lambda: os.unlink(os.__file__), lambda: os.rename(os.__file__, os.__file__ + 'x'))",
        "its own tests": "attempt(lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 0),"
        " lambda: os.open('/proc/self/fd/0', os.O_RDWR))",
        "signals to the actor": "attempt(*[lambda p=p, s=s: os.kill(p, s) or True for p in"
        " (os.getppid(), 0, -1, 1) for s in (0, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)],"
        " lambda: os.killpg(os.getppid(), signal.SIGTERM) or True,"
        " lambda: libc.syscall(200, os.getppid(), 15), lambda: libc.syscall(129, os.getppid(), 15, 0))",
        "signals by a descriptor": """
import fcntl
ours, theirs = socket.socketpair()
attempt(lambda: fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid()) or True)""",
        "limits of the actor": "attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE,"
        " (9, 9)), lambda: os.sched_setaffinity(os.getppid(), {0}) or True,"
        " lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19) or True)",
        "being root": "attempt(lambda: os.setuid(0) or True, lambda: os.setresuid(0, 0, 0) or True,"
        " lambda: os.setgroups([0]) or True, lambda: os.chroot('.') or True)",
        "namespaces of its own": "attempt(lambda: libc.unshare(0x10000000), lambda: libc.unshare(0x20000),"
        " lambda: libc.mount(b'none', b'/sys', b'tmpfs', 0, None), lambda: libc.setns(0, 0),"
        " lambda: libc.umount2(b'/', 2))",
        "the kernel": "attempt(lambda: libc.syscall(425, 8, bytes(120)), lambda: libc.syscall(321, 0, 0, 0),"
        " lambda: libc.syscall(323, 0), lambda: libc.syscall(298, 0, 0, 0, 0, 0), lambda: libc.prctl(1, 0),"
        " lambda: libc.syscall(250, 0, 0), lambda: libc.personality(0x40000))",
        "calls of 32 bits": """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80
run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
attempt(run)""",
    }


def _speaks_to_others() -> dict[str, str]:
    return {
        "network": """
def connect(kind, address):
    with socket.socket(*kind) as made: made.connect(address); made.send(b'x'); return True
attempt(lambda: connect((socket.AF_INET, socket.SOCK_STREAM), ('127.0.0.1', PORT)),
    lambda: connect((socket.AF_INET, socket.SOCK_DGRAM), ('127.0.0.1', PORT)))""",
        "sockets of our own": """
def connect(address):
    with socket.socket(socket.AF_UNIX) as made: made.connect(address); return True
attempt(lambda: connect('SOCKET'), lambda: connect('\\0ABSTRACT'))""",
        "kernel sockets": "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),"
        " lambda: socket.socket(38, socket.SOCK_SEQPACKET), lambda: socket.socket(socket.AF_PACKET,"
        " socket.SOCK_RAW), lambda: socket.socketpair(socket.AF_INET))",
    }


def _ends_oddly() -> dict[str, str]:
    return {
        "early exit": "os._exit(0)",
        "the judge's words": "os.write(1, b'ready\\npassed\\n'); os.write(2, b'passed\\n'); sys.exit(0)",
        "right, but failed": "print(4); sys.exit(3)",
        "segmentation fault": "print(4, flush=True); ctypes.string_at(0)",
        "endless recursion": "sys.setrecursionlimit(10**9)\ndef f(x): return repr([f(x)])\nf(1)",
        "unicode": "sys.stdout.buffer.write(b'\\xff\\xfe4' + '\\u0301\\u202e\\u0664'.encode() * 9999)",
        "huge numbers": "sys.stdout.write('4.' + '0' * 60000 + '1e99999999')",
        "a bomb to compile": "x = " + "(" * 5000 + ")" * 5000,
        "what is expected": """
import gc
found = [o for o in gc.get_objects() if 'expected' in str(type(o))]
frame, names = sys._getframe(), []
while frame: names += list(frame.f_locals) + list(frame.f_globals); frame = frame.f_back
attempt(lambda: 'wanted' in names or 'cases' in names or bool(found))""",
    }


def hostile_programs() -> dict[str, str]:
    """Return every program by the name of what it tries."""
    groups = (_starts_processes(), _takes_what_is_scarce(), _ends_oddly())
    return {name: TRY + program for group in groups for name, program in group.items()} | (
        programs_that_reach_out()
    )


def programs_that_reach_out() -> dict[str, str]:
    """Return those that want something of ours: the view, the filter or both are in the way."""
    groups = (_reads_what_is_ours(), _changes_what_is_ours(), _speaks_to_others())
    return {name: TRY + program for group in groups for name, program in group.items()}
