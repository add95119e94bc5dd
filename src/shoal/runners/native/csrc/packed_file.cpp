// The packed file: hashes of its pieces, pieces written, all of them read and checked.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

#include "model.h"

namespace shoal {

// Eight sums of 64 bits, so that none waits for its own multiplication; every input bit goes into the result.
uint64_t hash_of(const uint8_t* data, size_t bytes) {
    constexpr uint64_t kPrime = 0x9e3779b97f4a7c15, kOther = 0xc2b2ae3d27d4eb4f;
    uint64_t h[8];
    for (int i = 0; i < 8; i++) h[i] = kPrime * uint64_t(i + 1) ^ bytes;
    const auto mix = [](uint64_t sum, uint64_t word) {
        sum = (sum ^ word) * kPrime;
        return sum ^ sum >> 29;
    };
    size_t at = 0;
    for (; at + 64 <= bytes; at += 64)
#pragma GCC unroll 8  // or the sums would lie in memory
        for (int i = 0; i < 8; i++) {
            uint64_t word;
            memcpy(&word, data + at + size_t(i) * 8, 8);
            h[i] = mix(h[i], word);
        }
    uint64_t out = bytes;
    for (; at < bytes; at++) out = mix(out, data[at]);
    for (uint64_t x : h) out = (mix(out, x) ^ x >> 32) * kOther;
    return out ^ out >> 32;
}

int write_piece(int descriptor, const uint8_t* data, size_t bytes, size_t at) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t wrote = pwrite(descriptor, data + done, bytes - done, off_t(at + done));
        if (wrote > 0)
            done += size_t(wrote);
        else if (wrote == 0 || errno != EINTR)
            return wrote == 0 ? ENOSPC : errno;
    }
#ifdef __linux__
    sync_file_range(descriptor, off_t(at), off_t(bytes), SYNC_FILE_RANGE_WRITE);  // what it cannot do, fsync will tell
#endif
    return 0;
}

Pages read_packed(const Packed& file, int threads, bool map) {
    struct Descriptor {
        int fd;
        ~Descriptor() {
            if (fd >= 0) close(fd);
        }
    } source{open(file.path.c_str(), O_RDONLY | O_CLOEXEC)};
    const off_t size = source.fd < 0 ? -1 : lseek(source.fd, 0, SEEK_END);
    if (size < 0) throw DamagedError(file.path + " cannot be read");
    std::vector<size_t> starts = {file.start};
    for (const Piece& piece : file.pieces) starts.push_back(starts.back() + std::min(piece.bytes, size_t(size) + 1));
    if (starts.back() != size_t(size)) throw DamagedError(file.path + " does not end where its pieces do");
    if (map) return Pages(source.fd, size_t(size));  // unchecked: to hash it would read it all
    Pages pages{size_t(size)};
    std::atomic<size_t> next{0};
    std::atomic<int> unread{0}, wrong{0};
    const auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < file.pieces.size();) {
            for (size_t at = starts[i]; at < starts[i + 1];) {
                const ssize_t got = pread(source.fd, pages.data() + at, starts[i + 1] - at, off_t(at));
                if (got <= 0) {
                    unread++;
                    return;
                }
                at += size_t(got);
            }
            if (hash_of(pages.data() + starts[i], file.pieces[i].bytes) != file.pieces[i].hash) wrong++;
        }
    };
    {
        std::vector<std::jthread> others;
        for (int i = 1; i < threads; i++) others.emplace_back(work);
        work();
    }
    if (unread) throw DamagedError(file.path + " cannot be read");
    if (wrong) throw DamagedError(file.path + " is damaged: what it holds is not what was written");
    return pages;
}

}  // namespace shoal
