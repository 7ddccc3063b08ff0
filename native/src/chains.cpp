// Hash chains of blocks of tokens: SHA-256 of the canonical CBOR of (parent, tokens, tail or null), as
// hybridkv.cache.hashing writes it in Python. The two are compared byte by byte in native/tests.
//
// OpenSSL hashes; what is here encodes integers (RFC 8949, 4.2.1) and spares a Python object for each of them.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <openssl/evp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

constexpr std::size_t kHash = 32;
constexpr std::size_t kBefore = 3;                                     // an array of three, a byte string of 32
constexpr std::uint8_t kBeforeParent[kBefore] = {0x83, 0x58, kHash};
constexpr std::uint8_t kNull = 0xF6;
constexpr std::size_t kLongestToken = 5, kLongestHead = 9, kLongestBlock = std::size_t{1} << 31;

using Tokens = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The argument of a head, its `size` low bytes, big-endian; where it ends.
inline std::uint8_t *write_big_endian(std::uint8_t *out, std::uint64_t n, int size) {
    for (int shift = 8 * (size - 1); shift >= 0; shift -= 8)
        *out++ = static_cast<std::uint8_t>(n >> shift);
    return out;
}

// A head of major type `major` with argument `n`, in its shortest form; where it ends.
inline std::uint8_t *write_head(std::uint8_t *out, std::uint8_t major, std::uint64_t n) {
    const std::uint8_t type = static_cast<std::uint8_t>(major << 5);
    if (n < 24) {
        *out++ = static_cast<std::uint8_t>(type | n);
        return out;
    }
    if (n <= UINT8_MAX) {
        *out++ = type | 24;
        return write_big_endian(out, n, 1);
    }
    if (n <= UINT16_MAX) {
        *out++ = type | 25;
        return write_big_endian(out, n, 2);
    }
    if (n <= UINT32_MAX) {
        *out++ = type | 26;
        return write_big_endian(out, n, 4);
    }
    *out++ = type | 27;
    return write_big_endian(out, n, 8);
}

// The algorithm, found once: that takes longer than to hash a block.
const EVP_MD *sha256() {
    static const EVP_MD *const found = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    if (found == nullptr)
        throw std::runtime_error("OpenSSL offers no SHA-256");
    return found;
}

// OpenSSL's state, one of each call: several threads hash at once.
class Sha256 {
public:
    Sha256() : context_(EVP_MD_CTX_new()) {
        if (!context_ || !EVP_DigestInit_ex2(context_.get(), sha256(), nullptr))
            throw std::runtime_error("OpenSSL could not begin a hash");
    }

    void digest(const std::uint8_t *data, std::size_t size, std::uint8_t *out) {
        if (!EVP_DigestInit_ex2(context_.get(), nullptr, nullptr) || !EVP_DigestUpdate(context_.get(), data, size) ||
            !EVP_DigestFinal_ex(context_.get(), out, nullptr))
            throw std::runtime_error("OpenSSL could not hash a block");
    }

private:
    struct Free {
        void operator()(EVP_MD_CTX *context) const { EVP_MD_CTX_free(context); }
    };
    std::unique_ptr<EVP_MD_CTX, Free> context_;
};

// The bytes that end each block in place of null; pointers stay good while `owner` lives.
struct Tails {
    std::vector<std::pair<const char *, std::size_t>> parts; // a null pointer: null
    std::size_t longest = 1;
    nb::list owner;

    Tails(const std::optional<nb::list> &tails, std::size_t blocks) {
        if (!tails)
            return;
        owner = nb::steal<nb::list>(PySequence_List(tails->ptr())); // others may change theirs while it is read
        if (!owner.is_valid())
            throw nb::python_error();
        if (owner.size() != blocks)
            throw nb::value_error("tails: one of each block is wanted");
        for (nb::handle tail : owner) {
            if (tail.is_none()) {
                parts.emplace_back(nullptr, 0);
                continue;
            }
            if (!nb::isinstance<nb::bytes>(tail))
                throw nb::type_error("tails: bytes or None");
            const auto octets = nb::borrow<nb::bytes>(tail);
            parts.emplace_back(octets.c_str(), octets.size());
            longest = std::max(longest, octets.size());
        }
    }

    std::uint8_t *write(std::uint8_t *out, std::size_t block) const {
        if (parts.empty() || parts[block].first == nullptr) {
            *out++ = kNull;
            return out;
        }
        std::memcpy(out, parts[block].first, parts[block].second);
        return out + parts[block].second;
    }
};

// One block at a time is written into `text` behind its parent, and hashed.
class Blocks {
public:
    Blocks(const Tokens &tokens, std::size_t block_size, const std::optional<nb::list> &tails)
        : tokens_(tokens.data()), block_size_(block_size), count_(count(tokens.shape(0), block_size)),
          tails_(tails, count_), text_(kBefore + kHash + kLongestHead + kLongestToken * block_size + tails_.longest) {
        std::memcpy(text_.data(), kBeforeParent, kBefore);
    }

    std::size_t size() const { return count_; }

    void hash(std::size_t block, const std::uint8_t *parent, std::uint8_t *out) {
        std::uint8_t *const key = text_.data() + kBefore;
        std::memcpy(key, parent, kHash);
        std::uint8_t *end = write_head(key + kHash, 4, block_size_);
        const std::uint32_t *token = tokens_ + block * block_size_;
        for (std::size_t i = 0; i < block_size_; ++i)
            end = write_head(end, 0, token[i]);
        end = tails_.write(end, block);
        sha_.digest(text_.data(), static_cast<std::size_t>(end - text_.data()), out);
    }

private:
    static std::size_t count(std::size_t tokens, std::size_t block_size) {
        if (block_size == 0 || block_size > kLongestBlock || tokens % block_size)
            throw nb::value_error("tokens: whole blocks of 1 .. 2**31 tokens are wanted");
        return tokens / block_size;
    }

    const std::uint32_t *tokens_;
    std::size_t block_size_, count_;
    Tails tails_;
    std::vector<std::uint8_t> text_;
    Sha256 sha_;
};

const std::uint8_t *hash_of(nb::handle key) {
    if (!nb::isinstance<nb::bytes>(key))
        throw nb::type_error("parents: bytes");
    const auto octets = nb::borrow<nb::bytes>(key);
    if (octets.size() != kHash)
        throw nb::value_error("parents: 32 bytes are wanted");
    return reinterpret_cast<const std::uint8_t *>(octets.c_str());
}

nb::list objects(const std::vector<std::uint8_t> &hashes) {
    nb::list made;
    for (std::size_t at = 0; at < hashes.size(); at += kHash)
        made.append(nb::bytes(hashes.data() + at, kHash));
    return made;
}

nb::list sha256_chain(const nb::bytes &parent, const Tokens &tokens, std::size_t block_size,
                      const std::optional<nb::list> &tails) {
    Blocks blocks(tokens, block_size, tails);
    std::vector<std::uint8_t> hashes(blocks.size() * kHash);
    const std::uint8_t *key = hash_of(parent);
    {
        nb::gil_scoped_release others_run;
        for (std::size_t block = 0; block < blocks.size(); ++block) {
            std::uint8_t *const out = hashes.data() + block * kHash;
            blocks.hash(block, key, out);
            key = out;
        }
    }
    return objects(hashes);
}

nb::list sha256_rows(const nb::list &parents, const Tokens &tokens, std::size_t block_size,
                     const std::optional<nb::list> &tails) {
    Blocks blocks(tokens, block_size, tails);
    if (parents.size() != blocks.size())
        throw nb::value_error("parents: one of each block is wanted");
    std::vector<std::uint8_t> hashes(blocks.size() * kHash);
    for (std::size_t block = 0; block < blocks.size(); ++block)
        blocks.hash(block, hash_of(parents[block]), hashes.data() + block * kHash);
    return objects(hashes);
}

} // namespace

NB_MODULE(hybridkv_native, module) {
    module.doc() = "Compiled hash chains of hybridkv.";
    module.attr("INTERFACE") = 1;
    module.def("sha256_chain", &sha256_chain, nb::arg("parent"), nb::arg("tokens").noconvert(), nb::arg("block_size"),
               nb::arg("tails").none(),
               "Hashes of consecutive blocks behind `parent`, 32 bytes. tokens: uint32 [n * block_size]. tails: bytes or "
               "None of each block, or None. Raises TypeError, ValueError. Other threads run meanwhile.");
    module.def("sha256_rows", &sha256_rows, nb::arg("parents"), nb::arg("tokens").noconvert(), nb::arg("block_size"),
               nb::arg("tails").none(), "Hashes of unrelated blocks, each behind its own parent; as sha256_chain.");
}
