// Empty: the library is included by the generated source, after preprocessing.
