// Thread pool and C entry points. The arithmetic is in kernel.h.
#include "hostupdate.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace hostupdate {
namespace {

constexpr int32_t kInterfaceVersion = 2;

// Denormals count as zero inside the kernels, as in XLA's CPU code: moments of parameters without
// gradient decay through that range, where some processors are a hundred times slower.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(read()) { write(saved_ | kFlush); }
  ~FlushDenormals() { write(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__) && defined(__GNUC__)
  using Word = unsigned int;
  static constexpr Word kFlush = 0x8040;  // flush to zero, denormals are zero
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;
  static Word read() { Word word; __asm__ volatile("mrs %0, fpcr" : "=r"(word)); return word; }
  static void write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = int;
  static constexpr Word kFlush = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word saved_;
};

struct Job {
  ChunkKernel kernel;
  Method method;
  const Slabs* slabs;
  const Chunk* chunks;
  int64_t count;
  const Scalars* scalars;
  alignas(64) float dither[kBlock];
  std::atomic<int64_t> next{0};

  // Chunks are independent, so which thread takes which does not change the result.
  void work() {
    FlushDenormals flush;
    for (int64_t i = next++; i < count; i = next++) kernel(method, *slabs, chunks[i], *scalars, dither);
  }
};

// Threads that wait for jobs; one job at a time, callers queue.
class Pool {
 public:
  Pool(int threads, const int32_t* cpus, int cpu_count) {
    workers_.reserve(threads);
    for (int i = 0; i < threads; ++i) {
      try {
        workers_.emplace_back([this] { loop(); });
      } catch (const std::system_error&) {
        failed_ = true;
        return;
      }
#if defined(__linux__)
      if (cpu_count > 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[i % cpu_count], &set);
        if (pthread_setaffinity_np(workers_.back().native_handle(), sizeof(set), &set)) failed_ = true;
      }
#else
      (void)cpus;
      if (cpu_count > 0) failed_ = true;
#endif
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  bool failed() const { return failed_; }

  void run(Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = &job;
    ++generation_;
    running_ = static_cast<int>(workers_.size());
    wake_.notify_all();
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

 private:
  void loop() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int running_ = 0;
  bool stop_ = false;
  bool failed_ = false;
};

// Rounding offsets of v: an additive recurrence over position and step (Roberts' R2 constants), so
// that every position's offsets are evenly spread over consecutive steps.
void fill_dither(uint32_t count, float* dither) {
  for (uint32_t j = 0; j < kBlock; ++j) {
    const uint32_t word = j * 0xC13FA9A9u + count * 0x91E10DA5u;
    dither[j] = static_cast<float>(word >> 16) * (1.0f / 65536.0f);
  }
}

bool cpu_supports(int path) {
  if (path == 0) return true;
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (path == 1) return __builtin_cpu_supports("avx2");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

ChunkKernel kernel_of(int path) {
  if (path < 0 || path > 2 || !cpu_supports(path)) return nullptr;
  return path == 0 ? portable_kernel() : path == 1 ? avx2_kernel() : avx512_kernel();
}

}  // namespace
}  // namespace hostupdate

using namespace hostupdate;

extern "C" {

int32_t hostupdate_interface_version() { return kInterfaceVersion; }

// Paths: 0 portable, 1 AVX2, 2 AVX-512.
int32_t hostupdate_path_available(int32_t path) { return kernel_of(path) != nullptr; }

// `threads` workers, worker i bound to cpus[i % cpu_count] unless cpu_count is 0.
// Null when threads could not be started or bound.
void* hostupdate_pool_create(int32_t threads, const int32_t* cpus, int32_t cpu_count) {
  try {
    Pool* pool = new Pool(threads, cpus, cpu_count);
    if (!pool->failed()) return pool;
    delete pool;
  } catch (...) {
  }
  return nullptr;
}

void hostupdate_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

// Runs all chunks; with a null pool in the calling thread. Returns 0, or 1 for an unavailable path.
int32_t hostupdate_run(void* pool, int32_t path, int32_t method, const Slabs* slabs, const Chunk* chunks,
                       int64_t chunk_count, const Scalars* scalars) {
  Job job;
  job.kernel = kernel_of(path);
  if (job.kernel == nullptr) return 1;
  job.method = static_cast<Method>(method);
  job.slabs = slabs;
  job.chunks = chunks;
  job.count = chunk_count;
  job.scalars = scalars;
  fill_dither(scalars->count, job.dither);
  if (pool == nullptr) {
    job.work();
  } else {
    static_cast<Pool*>(pool)->run(job);
  }
  return 0;
}

}  // extern "C"
