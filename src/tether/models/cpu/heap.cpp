// A heap of its own for the larger tensors on a CPU: the smallest free range that is large enough, neighbours joined, pages kept.
//
// torch asks the C library for aligned blocks. Until version 2.38 glibc's aligned allocation needs a free range somewhat larger than
// the block that was freed there, small objects settle in what is left between, and a model's passes spread over twice the memory
// that is ever in use at once.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t GRAIN = 64, SMALLEST = size_t{1} << 14, LARGEST = size_t{1} << 30;

// Never destroyed: torch may free tensors after the destructors of this file would have run.
auto &lock = *new std::mutex;
auto &free_at = *new std::map<char *, size_t>;  // ranges below `top` that are free, no two of them neighbours
auto &free_by_size = *new std::set<std::pair<size_t, char *>>;
auto &taken = *new std::unordered_map<char *, size_t>;
char *base = nullptr, *top = nullptr, *limit = nullptr;
c10::Allocator *other = nullptr;                // for what is smaller or larger, and when the range is used up

void forget(std::map<char *, size_t>::iterator range) {
    free_by_size.erase({range->second, range->first});
    free_at.erase(range);
}

void remember(char *start, size_t size) {
    free_at.emplace(start, size);
    free_by_size.emplace(size, start);
}

// To torch's profiler; under the lock.
void tell(void *start, int64_t size) {
    static int64_t total = 0;
    total += size;
    if (c10::memoryProfilingEnabled()) c10::reportMemoryUsageToProfiler(start, size, total, 0, c10::Device(c10::DeviceType::CPU));
}

char *take(size_t size) {
    std::lock_guard<std::mutex> held(lock);
    char *start = top;
    if (auto found = free_by_size.lower_bound({size, nullptr}); found != free_by_size.end()) {
        size_t whole = found->first;
        start = found->second;
        forget(free_at.find(start));
        if (whole > size) remember(start + size, whole - size);
    } else if (auto last = free_at.empty() ? free_at.end() : std::prev(free_at.end());
               last != free_at.end() && last->first + last->second == top && last->first + size <= limit) {
        start = last->first;  // the free range at the top grows
        forget(last);
        top = start + size;
    } else if (size <= static_cast<size_t>(limit - top)) {
        top += size;
    } else {
        return nullptr;
    }
    taken.emplace(start, size);
    tell(start, size);
    return start;
}

void give_back(void *pointer) {
    char *start = static_cast<char *>(pointer);
    if (start < base || start >= limit) return other->raw_deleter()(pointer);
    std::lock_guard<std::mutex> held(lock);
    auto found = taken.find(start);
    size_t size = found->second;
    tell(pointer, -static_cast<int64_t>(size));
    taken.erase(found);
    auto next = free_at.lower_bound(start);
    if (next != free_at.begin()) {
        if (auto before = std::prev(next); before->first + before->second == start) {
            start = before->first, size += before->second;
            forget(before);
        }
    }
    if (next != free_at.end() && start + size == next->first) {
        size += next->second;
        forget(next);
    }
    remember(start, size);
}

struct Heap final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        if (size < SMALLEST || size >= LARGEST) return other->allocate(size);
        char *start = take((size + GRAIN - 1) / GRAIN * GRAIN);
        return start ? c10::DataPtr{start, start, give_back, c10::Device(c10::DeviceType::CPU)} : other->allocate(size);
    }
    c10::DeleterFnPtr raw_deleter() const override { return give_back; }
    void copy_data(void *to, const void *from, size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

// From now on torch's tensors of 16 kB to 1 GB lie in one range of `size` bytes of addresses. 0: there is no such range.
extern "C" int install(size_t size) {
    void *range = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return 0;
    base = top = static_cast<char *>(range), limit = base + size, other = c10::GetDefaultCPUAllocator();
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });
    c10::SetCPUAllocator(new Heap, 1);
    return 1;
}

// Free pages go back to the system.
extern "C" void trim(void) {
    std::lock_guard<std::mutex> held(lock);
    const size_t page = sysconf(_SC_PAGESIZE);
    for (auto [start, size] : free_at) {
        size_t from = (reinterpret_cast<size_t>(start) + page - 1) / page * page, to = reinterpret_cast<size_t>(start + size) / page * page;
        if (to > from) madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
    }
}

// Bytes in use, and how far the heap has ever reached.
extern "C" void occupied(size_t *used, size_t *reached) {
    std::lock_guard<std::mutex> held(lock);
    *used = 0, *reached = top - base;
    for (auto [_, size] : taken) *used += size;
}
